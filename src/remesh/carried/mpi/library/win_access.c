/* Reading, writing and folding into the memory of other ranks.
 *
 * The lower half knows one access: bytes of this process, runs of bytes at the target, and what is done with them. Here
 * datatypes become runs, and the data one run of bytes. Source: MPI 4.1, section 12.3.
 */
#include "basic.h"
#include "channel.h"
#include "op.h"
#include "op_values.h"
#include "request.h"
#include "win.h"

/* A buffer of this process, or elements in a target's memory. */
typedef struct {
    void *at;        /* of a buffer */
    MPI_Count count;
    Datatype *type;
} Elements;

typedef struct {
    int rank;
    MPI_Aint displacement; /* in units of the target */
    Elements elements;
} Target;

/* What an access needs until it is over. */
typedef struct {
    Win *win;
    const char *name; /* of what the program asked for */
    Target target;
    Landing landing;  /* where the result goes; .type NULL: there is none */
    void *owned;      /* data that were packed */
    Run *runs;
    int64_t num_runs, room;
} Accessing;

static void drop_accessing(void *state) {
    Accessing *accessing = state;
    if (accessing->landing.type) drop_landing(&accessing->landing);
    free(accessing->owned);
    free(accessing->runs);
    free(accessing);
}

static int64_t num_bytes_of(const Elements *elements) { return data_bytes(elements->type, elements->count); }

/* All parts are over: the result goes to its place, and an error gets its words. */
static int finish_access(Request *request) {
    Accessing *accessing = request->state;
    const Target *target = &accessing->target;
    if (!request->error) {
        if (accessing->landing.type) land(&accessing->landing, accessing->landing.room);
        return MPI_SUCCESS;
    }
    return fail(
        request->error, "%s: %lld bytes from displacement %lld (of %lld bytes) on at rank %d, which gave %lld bytes",
        accessing->name, (long long)num_bytes_of(&target->elements), (long long)target->displacement,
        (long long)accessing->win->units[target->rank], target->rank,
        (long long)accessing->win->sizes[target->rank]);
}

/* ---- What is done at the target ---- */

/* As the lower half numbers it. */
typedef struct {
    int op, type, unit;
} Verb;

/* Logical values of Fortran are integers of their size, of which 0 is false. */
static Basic foldable(Basic basic) {
    switch (basic) {
    case BASIC_LOGICAL1: return BASIC_INT8;
    case BASIC_LOGICAL2: return BASIC_INT16;
    case BASIC_LOGICAL4: return BASIC_INT32;
    case BASIC_LOGICAL8: return BASIC_INT64;
    default: return basic;
    }
}

static int find_verb(const Op *op, const Elements *there, Verb *verb) {
    const BasicRow *row = basic_of(there->type->basic);
    *verb = (Verb){OP_NO_OP, 0, row->size};
    if (num_bytes_of(there) == 0) return MPI_SUCCESS;
    if (op->number < 0)
        return fail(MPI_ERR_OP, "operations of the program cannot be used on windows; fold after an MPI_Get");
    verb->op = op->number;
    if (op->number == OP_REPLACE || op->number == OP_NO_OP) return MPI_SUCCESS;
    TRY(check_op(op, there->type));
    bool is_logical = op->number >= OP_LAND && op->number <= OP_LXOR;
    verb->type = basic_of(foldable(there->type->basic))->real_type;
    if (verb->type < 0 || (is_logical && row->kind == OF_REALS))
        return fail(MPI_ERR_OP, "the operation is not carried for %s on windows", there->type->name);
    return MPI_SUCCESS;
}

/* ---- Runs at the target ---- */

static void add_run(void *state, Segment run) {
    Accessing *accessing = state;
    if (accessing->num_runs == accessing->room) {
        accessing->room = accessing->room ? 2 * accessing->room : 1;
        accessing->runs = must_have(realloc(accessing->runs, (size_t)accessing->room * sizeof(Run)));
    }
    accessing->runs[accessing->num_runs++] = (Run){run.offset, run.num_bytes};
}

/* As many accesses of the lower half as it takes for so many runs: each takes the next piece of data and result. */
static int start_steps(Request *request, const Verb *verb, const char *data, int64_t data_bytes_, bool fetches) {
    Accessing *accessing = request->state;
    const Comm *comm = accessing->win->comm;
    char *result = accessing->landing.at;
    for (int i = 0; i < request->num_steps; i++) {
        const Run *runs = accessing->runs + (int64_t)i * MAX_RUNS;
        int64_t left = accessing->num_runs - (int64_t)i * MAX_RUNS, num_bytes = 0;
        uint32_t num_runs = left > MAX_RUNS ? MAX_RUNS : (uint32_t)left;
        for (uint32_t run = 0; run < num_runs; run++) num_bytes += runs[run].num_bytes;
        Access access = {
            .op = verb->op, .type = verb->type, .unit = verb->unit, .target = comm->world[accessing->target.rank],
            .fetches = fetches, .data = data, .runs = runs, .num_runs = num_runs};
        /* Compare-and-swap has two values for its one run. */
        access.data_bytes = request->num_steps == 1 ? data_bytes_ : data ? num_bytes : 0;
        Operation *operation = &request->steps[i].operation;
        if (fetches) *operation = (Operation){.at = result, .room = num_bytes};
        TRY(lower_access(comm->number, &access, operation));
        data = data ? data + num_bytes : NULL;
        result = fetches ? result + num_bytes : NULL;
    }
    return MPI_SUCCESS;
}

/* ---- One access ---- */

/* What a call asks for. `origin` and `result` are NULL where it has none. */
typedef struct {
    Win *win;
    Target target;
    const Elements *origin, *result;
    const Op *op;
} Ask;

static int check_fit(const Elements *here, const Elements *there) {
    if (!here || num_bytes_of(here) == num_bytes_of(there)) return MPI_SUCCESS;
    return fail(MPI_ERR_TRUNCATE, "%lld bytes at the origin, %lld at the target", (long long)num_bytes_of(here),
                (long long)num_bytes_of(there));
}

static const char *name_of(const Ask *ask, const Verb *verb) {
    if (verb->op == OP_COMPARE_AND_SWAP) return "Compare_and_swap";
    if (!ask->result) return verb->op == OP_REPLACE ? "Put" : "Accumulate";
    return ask->origin || verb->op != OP_NO_OP ? "Get_accumulate" : "Get";
}

static int begin(const Ask *ask, const Verb *verb, Payload payload, Request **request) {
    const Elements *there = &ask->target.elements;
    Accessing *accessing = NEW(Accessing);
    *accessing = (Accessing){.win = ask->win, .name = name_of(ask, verb), .target = ask->target, .owned = payload.owned};
    if (ask->result) accessing->landing = landing_for(ask->result->at, ask->result->count, ask->result->type);
    MPI_Aint base = ask->target.displacement * ask->win->units[ask->target.rank];
    visit_runs(there->type, base, there->count, add_run, accessing);
    int num_steps = (int)((accessing->num_runs + MAX_RUNS - 1) / MAX_RUNS);
    Request *made = make_request(NULL, num_steps);
    made->win = ask->win;
    made->state = accessing;
    made->drop_state = drop_accessing;
    made->finish = finish_access;
    int error = start_steps(made, verb, payload.num_bytes ? payload.at : NULL, payload.num_bytes, ask->result != NULL);
    *request = made;
    return error;
}

static int check_ask(const Ask *ask) {
    TRY(check_window_rank(ask->win, ask->target.rank));
    TRY(check_fit(ask->origin, &ask->target.elements));
    TRY(check_fit(ask->result, &ask->target.elements));
    return check_epoch(ask->win, ask->target.rank);
}

/* Begins an access; `own`: the program gets its request. What fails to begin has ended with what had begun of it. */
static int access_with(const Ask *ask, const Verb *verb, Payload payload, Request **own) {
    Request *request = NULL;
    int error = begin(ask, verb, payload, &request);
    if (error) {
        finish_now(request);
        return error;
    }
    if (own) *own = request;
    return note_access(ask->win, ask->target.rank, request, own != NULL);
}

static int access_window(const Ask *ask, Request **own) {
    if (ask->target.rank == MPI_PROC_NULL) {
        if (own) *own = request_from_nobody(ask->win->comm);
        return MPI_SUCCESS;
    }
    Verb verb;
    TRY(check_ask(ask));
    TRY(find_verb(ask->op, &ask->target.elements, &verb));
    bool has_data = ask->origin && verb.op != OP_NO_OP;
    Payload payload = {0};
    if (has_data) payload = payload_of(ask->origin->at, ask->origin->count, ask->origin->type);
    return access_with(ask, &verb, payload, own);
}

/* ---- MPI's functions ---- */

#define BUFFER(name) {(void *)(uintptr_t)name##_addr, name##_count, name##_datatype}
#define TARGET {target_rank, target_disp, {NULL, target_count, target_datatype}}

static const Op *replace_op(void) { return op_of(MPI_REPLACE); }
static const Op *no_op(void) { return op_of(MPI_NO_OP); }

int do_Rput(
    const void *origin_addr, MPI_Count origin_count, Datatype *origin_datatype, int target_rank, MPI_Aint target_disp,
    MPI_Count target_count, Datatype *target_datatype, Win *win, Request **request) {
    Elements origin = BUFFER(origin);
    return access_window(&(Ask){win, TARGET, &origin, NULL, replace_op()}, request);
}

int do_Put(
    const void *origin_addr, MPI_Count origin_count, Datatype *origin_datatype, int target_rank, MPI_Aint target_disp,
    MPI_Count target_count, Datatype *target_datatype, Win *win) {
    return do_Rput(origin_addr, origin_count, origin_datatype, target_rank, target_disp, target_count, target_datatype,
                   win, NULL);
}

int do_Rget(
    void *origin_addr, MPI_Count origin_count, Datatype *origin_datatype, int target_rank, MPI_Aint target_disp,
    MPI_Count target_count, Datatype *target_datatype, Win *win, Request **request) {
    Elements origin = BUFFER(origin);
    return access_window(&(Ask){win, TARGET, NULL, &origin, no_op()}, request);
}

int do_Get(
    void *origin_addr, MPI_Count origin_count, Datatype *origin_datatype, int target_rank, MPI_Aint target_disp,
    MPI_Count target_count, Datatype *target_datatype, Win *win) {
    return do_Rget(origin_addr, origin_count, origin_datatype, target_rank, target_disp, target_count, target_datatype,
                   win, NULL);
}

int do_Raccumulate(
    const void *origin_addr, MPI_Count origin_count, Datatype *origin_datatype, int target_rank, MPI_Aint target_disp,
    MPI_Count target_count, Datatype *target_datatype, Op *op, Win *win, Request **request) {
    Elements origin = BUFFER(origin);
    return access_window(&(Ask){win, TARGET, &origin, NULL, op}, request);
}

int do_Accumulate(
    const void *origin_addr, MPI_Count origin_count, Datatype *origin_datatype, int target_rank, MPI_Aint target_disp,
    MPI_Count target_count, Datatype *target_datatype, Op *op, Win *win) {
    return do_Raccumulate(origin_addr, origin_count, origin_datatype, target_rank, target_disp, target_count,
                          target_datatype, op, win, NULL);
}

int do_Rget_accumulate(
    const void *origin_addr, MPI_Count origin_count, Datatype *origin_datatype, void *result_addr,
    MPI_Count result_count, Datatype *result_datatype, int target_rank, MPI_Aint target_disp, MPI_Count target_count,
    Datatype *target_datatype, Op *op, Win *win, Request **request) {
    Elements origin = BUFFER(origin), result = BUFFER(result);
    /* What is at the origin is not looked at then, be it a datatype or none. */
    bool has_data = op != no_op();
    if (!result_datatype || !target_datatype || (has_data && !origin_datatype))
        return fail(MPI_ERR_TYPE, "a datatype is MPI_DATATYPE_NULL");
    return access_window(&(Ask){win, TARGET, has_data ? &origin : NULL, &result, op}, request);
}

int do_Get_accumulate(
    const void *origin_addr, MPI_Count origin_count, Datatype *origin_datatype, void *result_addr,
    MPI_Count result_count, Datatype *result_datatype, int target_rank, MPI_Aint target_disp, MPI_Count target_count,
    Datatype *target_datatype, Op *op, Win *win) {
    return do_Rget_accumulate(origin_addr, origin_count, origin_datatype, result_addr, result_count, result_datatype,
                              target_rank, target_disp, target_count, target_datatype, op, win, NULL);
}

/* ---- One element ---- */

static int check_predefined(const Datatype *type) {
    if (type->object.is_predefined) return MPI_SUCCESS;
    return fail(MPI_ERR_TYPE, "the datatype is derived, expected a predefined one");
}

int do_Fetch_and_op(
    const void *origin_addr, void *result_addr, Datatype *datatype, int target_rank, MPI_Aint target_disp, Op *op,
    Win *win) {
    TRY(check_predefined(datatype));
    return do_Get_accumulate(origin_addr, 1, datatype, result_addr, 1, datatype, target_rank, target_disp, 1, datatype,
                             op, win);
}

/* Source: MPI 4.1, section 12.3.4: integers, logical values and bytes. */
static int check_comparable(const Datatype *type) {
    TRY(check_predefined(type));
    BasicKind kind = basic_of(type->basic)->kind;
    if (kind == OF_BYTES || kind == OF_INTEGERS || kind == OF_LOGICALS) return MPI_SUCCESS;
    return fail(MPI_ERR_TYPE, "comparing %s; expected integers, logical values or bytes", type->name);
}

int do_Compare_and_swap(
    const void *origin_addr, const void *compare_addr, void *result_addr, Datatype *datatype, int target_rank,
    MPI_Aint target_disp, Win *win) {
    TRY(check_comparable(datatype));
    if (target_rank == MPI_PROC_NULL) return MPI_SUCCESS;
    Elements result = {result_addr, 1, datatype};
    Ask ask = {win, {target_rank, target_disp, {NULL, 1, datatype}}, NULL, &result, NULL};
    TRY(check_ask(&ask));
    /* The new value, then the one that is expected. */
    size_t size = (size_t)datatype->size;
    char *both = must_have(malloc(2 * size));
    pack_elements(origin_addr, 1, datatype, both);
    pack_elements(compare_addr, 1, datatype, both + size);
    Verb verb = {OP_COMPARE_AND_SWAP, 0, (int)size};
    return access_with(&ask, &verb, (Payload){both, 2 * datatype->size, both}, NULL);
}
