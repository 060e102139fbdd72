/* An ordinary MPI program that does with datatypes and operations what stdin says, and prints what MPI answers.
 *
 * Datatypes have numbers; 0 to 10 are predefined. Every line begins with a word; see main(). It is compiled against the
 * library, and against another MPI where there is one.
 */
#include <inttypes.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TYPES = 4096, MAX_BLOCKS = 4096 };
static MPI_Datatype types[MAX_TYPES];
static int ints[4][MAX_BLOCKS];
static MPI_Aint addresses[MAX_BLOCKS];
static MPI_Datatype old_types[MAX_BLOCKS];

static long long number(void) {
    long long value;
    if (scanf("%lld", &value) != 1) exit(2);
    return value;
}

static void word(char *text) {
    if (scanf("%63s", text) != 1) exit(2);
}

static void read_ints(int which, int count) {
    for (int i = 0; i < count; i++) ints[which][i] = (int)number();
}

static void read_addresses(int count) {
    for (int i = 0; i < count; i++) addresses[i] = (MPI_Aint)number();
}

static void print_bytes(const unsigned char *bytes, long long count) {
    for (long long i = 0; i < count; i++) printf("%02x", bytes[i]);
    printf("\n");
}

/* ---- constructors ---- */

static int distribution(const char *name) {
    return *name == 'B' ? MPI_DISTRIBUTE_BLOCK : *name == 'C' ? MPI_DISTRIBUTE_CYCLIC : MPI_DISTRIBUTE_NONE;
}

static void make_darray(MPI_Datatype *made, MPI_Datatype old) {
    int size = (int)number(), rank = (int)number(), ndims = (int)number();
    read_ints(0, ndims);
    for (int i = 0; i < ndims; i++) {
        char name[64];
        word(name);
        ints[1][i] = distribution(name);
    }
    for (int i = 0; i < ndims; i++) {
        int argument = (int)number();
        ints[2][i] = argument ? argument : MPI_DISTRIBUTE_DFLT_DARG;
    }
    read_ints(3, ndims);
    char order[64];
    word(order);
    MPI_Type_create_darray(
        size, rank, ndims, ints[0], ints[1], ints[2], ints[3], *order == 'C' ? MPI_ORDER_C : MPI_ORDER_FORTRAN, old, made);
}

static void make_struct(MPI_Datatype *made) {
    int count = (int)number();
    read_ints(0, count);
    read_addresses(count);
    for (int i = 0; i < count; i++) old_types[i] = types[number()];
    MPI_Type_create_struct(count, ints[0], addresses, old_types, made);
}

static void make_subarray(MPI_Datatype *made, MPI_Datatype old) {
    int ndims = (int)number();
    for (int which = 0; which < 3; which++) read_ints(which, ndims);
    char order[64];
    word(order);
    MPI_Type_create_subarray(
        ndims, ints[0], ints[1], ints[2], *order == 'C' ? MPI_ORDER_C : MPI_ORDER_FORTRAN, old, made);
}

static void make_blocks(const char *what, MPI_Datatype *made, MPI_Datatype old) {
    int count = (int)number();
    int is_block = strstr(what, "block") != NULL, is_bytes = *what == 'h';
    read_ints(0, is_block ? 1 : count);
    if (is_bytes) read_addresses(count);
    else read_ints(1, count);
    if (is_block && is_bytes) MPI_Type_create_hindexed_block(count, ints[0][0], addresses, old, made);
    else if (is_block) MPI_Type_create_indexed_block(count, ints[0][0], ints[1], old, made);
    else if (is_bytes) MPI_Type_create_hindexed(count, ints[0], addresses, old, made);
    else MPI_Type_indexed(count, ints[0], ints[1], old, made);
}

static void make(const char *what) {
    MPI_Datatype *made = &types[number()];
    if (!strcmp(what, "struct")) {
        make_struct(made);
        return;
    }
    MPI_Datatype old = types[number()];
    if (!strcmp(what, "dup")) MPI_Type_dup(old, made);
    else if (!strcmp(what, "contiguous")) MPI_Type_contiguous((int)number(), old, made);
    else if (!strcmp(what, "resized")) {
        read_addresses(2);
        MPI_Type_create_resized(old, addresses[0], addresses[1], made);
    } else if (!strcmp(what, "vector")) {
        read_ints(0, 3);
        MPI_Type_vector(ints[0][0], ints[0][1], ints[0][2], old, made);
    } else if (!strcmp(what, "hvector")) {
        read_ints(0, 2);
        read_addresses(1);
        MPI_Type_create_hvector(ints[0][0], ints[0][1], addresses[0], old, made);
    } else if (!strcmp(what, "subarray")) make_subarray(made, old);
    else if (!strcmp(what, "darray")) make_darray(made, old);
    else make_blocks(what, made, old);
}

/* ---- questions ---- */

static const char *combiner_name(int combiner) {
    const int numbers[] = {
        MPI_COMBINER_NAMED, MPI_COMBINER_DUP, MPI_COMBINER_CONTIGUOUS, MPI_COMBINER_VECTOR, MPI_COMBINER_HVECTOR,
        MPI_COMBINER_INDEXED, MPI_COMBINER_HINDEXED, MPI_COMBINER_INDEXED_BLOCK, MPI_COMBINER_HINDEXED_BLOCK,
        MPI_COMBINER_STRUCT, MPI_COMBINER_SUBARRAY, MPI_COMBINER_DARRAY, MPI_COMBINER_RESIZED};
    static const char *const names[] = {
        "named", "dup", "contiguous", "vector", "hvector", "indexed", "hindexed", "indexed_block", "hindexed_block",
        "struct", "subarray", "darray", "resized"};
    for (int i = 0; i < 13; i++) {
        if (numbers[i] == combiner) return names[i];
    }
    return "?";
}

static void tell(MPI_Datatype type) {
    int num_ints, num_addresses, num_types, combiner;
    MPI_Type_get_envelope(type, &num_ints, &num_addresses, &num_types, &combiner);
    if (combiner == MPI_COMBINER_NAMED) {
        char name[MPI_MAX_OBJECT_NAME];
        int length;
        MPI_Type_get_name(type, name, &length);
        printf(" %s", name);
        return;
    }
    int *integers = calloc((size_t)num_ints + 1, sizeof *integers);
    MPI_Aint *displacements = calloc((size_t)num_addresses + 1, sizeof *displacements);
    MPI_Datatype *made_of = calloc((size_t)num_types + 1, sizeof *made_of);
    MPI_Type_get_contents(type, num_ints, num_addresses, num_types, integers, displacements, made_of);
    printf(" (%s", combiner_name(combiner));
    for (int i = 0; i < num_ints; i++) printf(" %d", integers[i]);
    printf(" |");
    for (int i = 0; i < num_addresses; i++) printf(" %lld", (long long)displacements[i]);
    printf(" |");
    for (int i = 0; i < num_types; i++) {
        tell(made_of[i]);
        int is_named, unused;
        MPI_Type_get_envelope(made_of[i], &unused, &unused, &unused, &is_named);
        if (is_named != MPI_COMBINER_NAMED) MPI_Type_free(&made_of[i]);
    }
    printf(")");
    free(integers);
    free(displacements);
    free(made_of);
}

static void bounds(MPI_Datatype type) {
    MPI_Count size;
    MPI_Aint lb, extent, true_lb, true_extent;
    MPI_Type_size_x(type, &size);
    MPI_Type_get_extent(type, &lb, &extent);
    MPI_Type_get_true_extent(type, &true_lb, &true_extent);
    printf("%lld %lld %lld %lld %lld\n", (long long)size, (long long)lb, (long long)extent, (long long)true_lb,
        (long long)true_extent);
}

static unsigned char *pattern(long long num_bytes) {
    unsigned char *bytes = malloc((size_t)num_bytes + 1);
    for (long long i = 0; i < num_bytes; i++) bytes[i] = (unsigned char)(i * 7 + i / 251);
    return bytes;
}

/* Memory of `room` bytes, of which the elements begin at `start`; then the same way back into memory of 0xee. */
static void pack(MPI_Datatype type) {
    int count = (int)number(), size;
    long long start = number(), room = number();
    unsigned char *memory = pattern(room);
    MPI_Type_commit(&type);
    MPI_Pack_size(count, type, MPI_COMM_SELF, &size);
    unsigned char *packed = malloc((size_t)size + 1);
    int position = 0;
    MPI_Pack(memory + start, count, type, packed, size, &position, MPI_COMM_SELF);
    print_bytes(packed, position);
    memset(memory, 0xee, (size_t)room);
    int end = position;
    position = 0;
    MPI_Unpack(packed, end, &position, memory + start, count, type, MPI_COMM_SELF);
    print_bytes(memory, room);
    free(packed);
    free(memory);
}

static void pack_external(MPI_Datatype type) {
    int count = (int)number();
    long long start = number(), room = number();
    unsigned char *memory = pattern(room);
    MPI_Aint size, position = 0;
    MPI_Type_commit(&type);
    MPI_Pack_external_size("external32", count, type, &size);
    unsigned char *packed = malloc((size_t)size + 1);
    MPI_Pack_external("external32", memory + start, count, type, packed, size, &position);
    print_bytes(packed, position);
    memset(memory, 0xee, (size_t)room);
    MPI_Aint end = position;
    position = 0;
    MPI_Unpack_external("external32", packed, end, &position, memory + start, count, type);
    print_bytes(memory, room);
    free(packed);
    free(memory);
}

/* ---- operations ---- */

static MPI_Op op_named(const char *name) {
    const MPI_Op ops[] = {MPI_SUM, MPI_PROD, MPI_MAX, MPI_MIN, MPI_LAND, MPI_LOR, MPI_LXOR, MPI_BAND, MPI_BOR, MPI_BXOR,
        MPI_MINLOC, MPI_MAXLOC, MPI_REPLACE, MPI_NO_OP};
    static const char *const names[] = {"SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR",
        "MINLOC", "MAXLOC", "REPLACE", "NO_OP"};
    for (int i = 0; i < 14; i++) {
        if (!strcmp(names[i], name)) return ops[i];
    }
    exit(3);
}

/* Not commutative: what it gives tells which operand came first. */
static void twice_first(void *in, void *inout, int *count, MPI_Datatype *type) {
    MPI_Aint lb, extent;
    MPI_Type_get_extent(*type, &lb, &extent);
    for (int i = 0; i < *count; i++) {
        int first, second;
        memcpy(&first, (char *)in + i * extent, sizeof first);
        memcpy(&second, (char *)inout + i * extent, sizeof second);
        second += 2 * first;
        memcpy((char *)inout + i * extent, &second, sizeof second);
    }
}

static MPI_Datatype type_named(const char *name);

static void read_bytes(unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        unsigned value;
        if (scanf("%2x", &value) != 1) exit(2);
        bytes[i] = (unsigned char)value;
    }
}

/* reduce OP TYPE COUNT BYTES: both operands in hexadecimal as they stand in memory. */
static void reduce(void) {
    char op_word[64], type_word[64];
    word(op_word);
    word(type_word);
    int count = (int)number();
    size_t num_bytes = (size_t)number();
    unsigned char *in = malloc(num_bytes + 1), *inout = malloc(num_bytes + 1);
    read_bytes(in, num_bytes);
    read_bytes(inout, num_bytes);
    MPI_Op op;
    int is_own = !strcmp(op_word, "OWN");
    if (is_own) MPI_Op_create(twice_first, 0, &op);
    else op = op_named(op_word);
    int is_number = type_word[strspn(type_word, "0123456789")] == 0;
    MPI_Datatype type = is_number ? types[atoi(type_word)] : type_named(type_word);
    int error = MPI_Reduce_local(in, inout, count, type, op);
    int error_class = 0;
    if (error) MPI_Error_class(error, &error_class);
    if (error) printf(error_class == MPI_ERR_OP ? "MPI_ERR_OP\n" : "error %d\n", error_class);
    else print_bytes(inout, (long long)num_bytes);
    if (is_own) MPI_Op_free(&op);
    free(in);
    free(inout);
}

/* collectives OP: the operation in each of them. */
static void use_in_collectives(void) {
    char op_word[64];
    word(op_word);
    MPI_Op op = op_named(op_word);
    int in = 1, inout = 2, one = 1;
    MPI_Request request;
    const int errors[] = {
        MPI_Reduce(&in, &inout, 1, MPI_INT, op, 0, MPI_COMM_SELF),
        MPI_Allreduce(&in, &inout, 1, MPI_INT, op, MPI_COMM_SELF),
        MPI_Scan(&in, &inout, 1, MPI_INT, op, MPI_COMM_SELF),
        MPI_Exscan(&in, &inout, 1, MPI_INT, op, MPI_COMM_SELF),
        MPI_Reduce_scatter(&in, &inout, &one, MPI_INT, op, MPI_COMM_SELF),
        MPI_Reduce_scatter_block(&in, &inout, 1, MPI_INT, op, MPI_COMM_SELF),
        MPI_Iallreduce(&in, &inout, 1, MPI_INT, op, MPI_COMM_SELF, &request),
        MPI_Allreduce_init(&in, &inout, 1, MPI_INT, op, MPI_COMM_SELF, MPI_INFO_NULL, &request)};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        int error_class = MPI_SUCCESS;
        if (errors[i]) MPI_Error_class(errors[i], &error_class);
        printf(error_class == MPI_ERR_OP ? "MPI_ERR_OP\n" : "error %d\n", error_class);
    }
}

#define NAMED(name) {#name, MPI_##name}
static MPI_Datatype type_named(const char *name) {
    const struct { const char *name; MPI_Datatype type; } all[] = {
        NAMED(BYTE), NAMED(CHAR), NAMED(SIGNED_CHAR), NAMED(UNSIGNED_CHAR), NAMED(SHORT), NAMED(UNSIGNED_SHORT),
        NAMED(INT), NAMED(UNSIGNED), NAMED(LONG), NAMED(UNSIGNED_LONG), NAMED(LONG_LONG), NAMED(UNSIGNED_LONG_LONG),
        NAMED(INT8_T), NAMED(INT16_T), NAMED(INT32_T), NAMED(INT64_T), NAMED(UINT8_T), NAMED(UINT16_T),
        NAMED(UINT32_T), NAMED(UINT64_T), NAMED(FLOAT), NAMED(DOUBLE), NAMED(LONG_DOUBLE), NAMED(C_BOOL),
        NAMED(C_FLOAT_COMPLEX), NAMED(C_DOUBLE_COMPLEX), NAMED(C_LONG_DOUBLE_COMPLEX), NAMED(AINT), NAMED(OFFSET),
        NAMED(COUNT), NAMED(INTEGER), NAMED(REAL), NAMED(DOUBLE_PRECISION), NAMED(COMPLEX), NAMED(DOUBLE_COMPLEX),
        NAMED(LOGICAL), NAMED(SHORT_INT), NAMED(2INT), NAMED(LONG_INT), NAMED(FLOAT_INT), NAMED(DOUBLE_INT),
        NAMED(LONG_DOUBLE_INT), NAMED(2INTEGER), NAMED(2REAL), NAMED(2DOUBLE_PRECISION), NAMED(WCHAR)};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!strcmp(all[i].name, name)) return all[i].type;
    }
    exit(3);
}

int main(int argc, char **argv) {
    char what[64];
    MPI_Init(&argc, &argv);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    const MPI_Datatype predefined[] = {MPI_CHAR, MPI_SHORT, MPI_INT, MPI_DOUBLE, MPI_FLOAT, MPI_BYTE, MPI_SHORT_INT,
        MPI_DOUBLE_INT, MPI_C_DOUBLE_COMPLEX, MPI_LONG_LONG, MPI_2INT};
    memcpy(types, predefined, sizeof predefined);
    while (scanf("%63s", what) == 1) {
        if (!strcmp(what, "bounds")) bounds(types[number()]);
        else if (!strcmp(what, "tell")) tell(types[number()]), printf("\n");
        else if (!strcmp(what, "pack")) pack(types[number()]);
        else if (!strcmp(what, "external")) pack_external(types[number()]);
        else if (!strcmp(what, "reduce")) reduce();
        else if (!strcmp(what, "collectives")) use_in_collectives();
        else if (!strcmp(what, "free")) MPI_Type_free(&types[number()]);
        else make(what);
    }
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
