/* Operations of reductions: the predefined ones, those of the program, and how operands are folded in this process. */
#include "op.h"

#include "channel.h"
#include "op_values.h"

/* ---- The predefined ones ---- */

/* In the order of ACCESS_OPS of calls/table.py. */
static const char *const names[] = {
    "MPI_SUM", "MPI_PROD", "MPI_MAX", "MPI_MIN", "MPI_LAND", "MPI_LOR", "MPI_LXOR", "MPI_BAND", "MPI_BOR", "MPI_BXOR",
    "MPI_MINLOC", "MPI_MAXLOC", "MPI_REPLACE", "MPI_NO_OP"};

void make_predefined_ops(void) {
    const MPI_Op handles[] = {
        MPI_SUM, MPI_PROD, MPI_MAX, MPI_MIN, MPI_LAND, MPI_LOR, MPI_LXOR, MPI_BAND, MPI_BOR, MPI_BXOR, MPI_MINLOC,
        MPI_MAXLOC, MPI_REPLACE, MPI_NO_OP};
    for (int number = 0; number <= OP_NO_OP; number++) {
        Op *op = make_predefined(KIND_OP, sizeof(Op), BITS(handles[number]));
        op->number = number;
        op->is_commutative = number != OP_REPLACE && number != OP_NO_OP;
    }
}

/* Whether all reductions are to be folded in the order of ranks, whatever the MPI library would do. */
static bool is_ordered(void) {
    static atomic_int known = -1;
    if (known < 0) {
        const char *wish = getenv("REMESH_REDUCTIONS");
        known = wish && !strcmp(wish, "ordered");
    }
    return known;
}

int check_op(const Op *op, const Datatype *type) {
    if (op->number < 0 || op->number >= OP_REPLACE || fold_of(op->number, type->basic)) return MPI_SUCCESS;
    const char *what = type->basic == BASIC_NONE ? "a datatype of several kinds of values" : type->name;
    return fail(MPI_ERR_OP, "%s is not defined for %s", names[op->number], *what ? what : "this datatype");
}

int check_reduction(const Op *op, const Datatype *type) {
    if (op->number == OP_REPLACE || op->number == OP_NO_OP)
        return fail(MPI_ERR_OP, "%s is an operation of windows only", names[op->number]);
    return check_op(op, type);
}

bool is_real(const Op *op, const Datatype *type) {
    if (op->number < 0 || op->number > OP_BXOR || real_type(type) < 0 || is_ordered()) return false;
    bool is_logical = op->number >= OP_LAND && op->number <= OP_LXOR;
    /* Not every MPI library has logical operations on reals. */
    return fold_of(op->number, type->basic) && !(is_logical && basic_of(type->basic)->kind == OF_REALS);
}

/* ---- Those of the program ---- */

static Op *make_op(int commute) {
    Op *op = make_object(KIND_OP, sizeof(Op));
    op->number = -1;
    op->is_commutative = commute != 0;
    return op;
}

int do_Op_create(MPI_User_function *user_fn, int commute, Op **op) {
    if (!user_fn) return fail(MPI_ERR_ARG, "user_fn is NULL");
    *op = make_op(commute);
    (*op)->function = user_fn;
    return MPI_SUCCESS;
}

int do_Op_create_c(MPI_User_function_c *user_fn, int commute, Op **op) {
    if (!user_fn) return fail(MPI_ERR_ARG, "user_fn is NULL");
    *op = make_op(commute);
    (*op)->large_function = user_fn;
    return MPI_SUCCESS;
}

int do_Op_free(MPI_Op *op) {
    Op *one = op_of(*op);
    if (!one) return fail(MPI_ERR_OP, *op == MPI_OP_NULL ? "op is MPI_OP_NULL" : "op is no such handle");
    if (one->object.is_predefined) return fail(MPI_ERR_OP, "%s is predefined and cannot be freed", names[one->number]);
    free_handle(one);
    *op = MPI_OP_NULL;
    return MPI_SUCCESS;
}

int do_Op_commutative(Op *op, int *commute) {
    *commute = op->is_commutative;
    return MPI_SUCCESS;
}

/* Operands as they stand in memory; a small function gets no more elements at once than an int can count. */
static void call_own(const Op *op, Datatype *type, MPI_Count count, const void *in, void *inout) {
    char *from = (char *)(uintptr_t)in, *to = inout;
    MPI_Datatype handle = datatype_handle(type);
    if (op->large_function) {
        op->large_function(from, to, &count, &handle);
        return;
    }
    while (count > 0) {
        int some = count > INT_MAX ? INT_MAX : (int)count;
        if (op->call) op->call(op, from, to, some, type);
        else op->function(from, to, &some, &handle);
        from += some * type->extent;
        to += some * type->extent;
        count -= some;
    }
}

/* ---- Folding ---- */

/* Memory in which `count` elements can be laid out: `at` is the address of the first. */
typedef struct {
    char *memory, *at;
} Spread;

static Spread spread_out(const void *packed, MPI_Count count, const Datatype *type) {
    MPI_Aint reach = (count - 1) * type->extent;
    MPI_Aint low = type->true_lb + (reach < 0 ? reach : 0);
    Spread spread = {.memory = must_have(calloc(1, (size_t)(type->true_extent + (reach < 0 ? -reach : reach))))};
    spread.at = (char *)((uintptr_t)spread.memory - (uintptr_t)low);
    unpack_elements(packed, data_bytes(type, count), spread.at, count, type);
    return spread;
}

static void fold_own(const Op *op, Datatype *type, MPI_Count count, const void *in, void *inout) {
    if (type->is_dense) {
        call_own(op, type, count, in, inout);
        return;
    }
    Spread operand = spread_out(in, count, type), result = spread_out(inout, count, type);
    call_own(op, type, count, operand.at, result.at);
    pack_elements(result.at, count, type, inout);
    free(operand.memory);
    free(result.memory);
}

void fold(const Op *op, Datatype *type, MPI_Count count, const void *in, void *inout) {
    int64_t num_bytes = data_bytes(type, count);
    if (num_bytes == 0) return;
    if (op->number < 0) {
        fold_own(op, type, count, in, inout);
    } else if (op->number == OP_REPLACE) {
        memcpy(inout, in, (size_t)num_bytes);
    } else if (op->number != OP_NO_OP) {
        Fold *each = fold_of(op->number, type->basic);
        if (each) each(in, inout, num_bytes / basic_of(type->basic)->size);
    }
}

int do_Reduce_local(const void *inbuf, void *inoutbuf, MPI_Count count, Datatype *datatype, Op *op) {
    TRY(check_op(op, datatype));
    if (inbuf == MPI_IN_PLACE || inoutbuf == MPI_IN_PLACE)
        return fail(MPI_ERR_BUFFER, "a buffer is MPI_IN_PLACE, which MPI_Reduce_local does not take");
    if (count == 0 || datatype->size == 0) return MPI_SUCCESS;
#if !defined(FACE_OPENMPI)
    if (inbuf == inoutbuf && inbuf != MPI_BOTTOM) return fail(MPI_ERR_BUFFER, "both buffers are one, expected two");
#endif
    if (op->number < 0) {
        call_own(op, datatype, count, inbuf, inoutbuf);
        return MPI_SUCCESS;
    }
    Payload operand = payload_of(inbuf, count, datatype), result = payload_of(inoutbuf, count, datatype);
    fold(op, datatype, count, operand.at, (void *)(uintptr_t)result.at);
    if (result.owned) unpack_elements(result.owned, result.num_bytes, inoutbuf, count, datatype);
    free(operand.owned);
    free(result.owned);
    return MPI_SUCCESS;
}
