/* MPI_Pack and MPI_Unpack, and their external forms.
 *
 * The plain form is the data without gaps. The external one is external32: big-endian, each value as large as it is
 * here, and a long double as an IEEE number of 128 bits, which keeps all that ours has. Source: MPI 4.1, sections 5.2
 * and 14.5.2.
 */
#include "basic.h"
#include "layout.h"

static int check_room(MPI_Count position, MPI_Count num_bytes, MPI_Count size) {
    if (position >= 0 && position <= size && num_bytes <= size - position) return MPI_SUCCESS;
    return fail(MPI_ERR_TRUNCATE, "%lld bytes from position %lld on of a buffer of %lld", (long long)num_bytes,
        (long long)position, (long long)size);
}

int do_Pack_size(MPI_Count incount, Datatype *datatype, Comm *comm, MPI_Count *size) {
    (void)comm;
    *size = data_bytes(datatype, incount);
    return MPI_SUCCESS;
}

int do_Pack(
    const void *inbuf, MPI_Count incount, Datatype *datatype, void *outbuf, MPI_Count outsize, MPI_Count *position,
    Comm *comm) {
    (void)comm;
    TRY(check_room(*position, data_bytes(datatype, incount), outsize));
    pack_elements(inbuf, incount, datatype, (char *)outbuf + *position);
    *position += data_bytes(datatype, incount);
    return MPI_SUCCESS;
}

int do_Unpack(
    const void *inbuf, MPI_Count insize, MPI_Count *position, void *outbuf, MPI_Count outcount, Datatype *datatype,
    Comm *comm) {
    (void)comm;
    if (outcount < 0) return fail(MPI_ERR_COUNT, "outcount is %lld, expected 0 or more", (long long)outcount);
    int64_t num_bytes = data_bytes(datatype, outcount);
    TRY(check_room(*position, num_bytes, insize));
    unpack_elements((const char *)inbuf + *position, num_bytes, outbuf, outcount, datatype);
    *position += num_bytes;
    return MPI_SUCCESS;
}

/* ---- external32 ---- */

static void turn(char *at, int unit) {
    for (int low = 0, high = unit - 1; low < high; low++, high--) {
        char byte = at[low];
        at[low] = at[high];
        at[high] = byte;
    }
}

/* Ours: 64 bits of fraction of which the first is the one before the point, then sign and exponent. IEEE's of 128 bits
 * has the same exponent, and does not store that first bit.
 */
static void widen_long_double(char *at) {
    uint64_t fraction, words[2];
    uint16_t top;
    memcpy(&fraction, at, 8);
    memcpy(&top, at + 8, 2);
    words[0] = fraction << 49;
    words[1] = (uint64_t)top << 48 | (fraction << 1) >> 16;
    memcpy(at, words, 16);
}

static void narrow_long_double(char *at) {
    uint64_t words[2];
    memcpy(words, at, 16);
    uint16_t top = (uint16_t)(words[1] >> 48);
    bool is_small = (top & 0x7fff) == 0;
    uint64_t fraction = words[1] << 15 | words[0] >> 49;
    fraction = (fraction & ~((uint64_t)1 << 63)) | (is_small ? 0 : (uint64_t)1 << 63);
    memset(at, 0, 16);
    memcpy(at, &fraction, 8);
    memcpy(at + 8, &top, 2);
}

static bool is_long_double(Basic basic) { return basic == BASIC_LONG_DOUBLE || basic == BASIC_LONG_DOUBLE_COMPLEX; }

/* Packed values on their way, as the layout names them one kind after the other. */
typedef struct {
    char *packed;
    bool outwards; /* to the external form */
} Turning;

static void turn_values(void *state, Values values) {
    Turning *turning = state;
    const BasicRow *row = basic_of(values.basic);
    MPI_Count num_bytes = values.count * row->size;
    for (char *at = turning->packed; row->unit > 1 && at < turning->packed + num_bytes; at += row->unit) {
        if (turning->outwards && is_long_double(values.basic)) widen_long_double(at);
        turn(at, row->unit);
        if (!turning->outwards && is_long_double(values.basic)) narrow_long_double(at);
    }
    turning->packed += num_bytes;
}

static void turn_packed(char *packed, MPI_Count count, const Datatype *type, bool outwards) {
    Turning turning = {packed, outwards};
    Part part = {.stride = type->extent, .count = count, .layout = type->layout};
    if (type->size > 0 && count > 0) visit_values(&part, 0, turn_values, &turning);
}

static int check_external(const char *datarep, MPI_Count count) {
    if (strcmp(datarep, "external32")) return fail(MPI_ERR_ARG, "datarep is \"%s\", expected \"external32\"", datarep);
    if (count < 0) return fail(MPI_ERR_COUNT, "the count is %lld, expected 0 or more", (long long)count);
    return MPI_SUCCESS;
}

int do_Pack_external_size(const char datarep[], MPI_Count incount, Datatype *datatype, MPI_Count *size) {
    TRY(check_external(datarep, incount));
    *size = data_bytes(datatype, incount);
    return MPI_SUCCESS;
}

int do_Pack_external(
    const char datarep[], const void *inbuf, MPI_Count incount, Datatype *datatype, void *outbuf, MPI_Count outsize,
    MPI_Count *position) {
    TRY(check_external(datarep, incount));
    TRY(check_room(*position, data_bytes(datatype, incount), outsize));
    char *to = (char *)outbuf + *position;
    pack_elements(inbuf, incount, datatype, to);
    turn_packed(to, incount, datatype, true);
    *position += data_bytes(datatype, incount);
    return MPI_SUCCESS;
}

int do_Unpack_external(
    const char datarep[], const void *inbuf, MPI_Count insize, MPI_Count *position, void *outbuf, MPI_Count outcount,
    Datatype *datatype) {
    TRY(check_external(datarep, outcount));
    int64_t num_bytes = data_bytes(datatype, outcount);
    TRY(check_room(*position, num_bytes, insize));
    if (num_bytes == 0) return MPI_SUCCESS;
    char *copy = must_have(malloc((size_t)num_bytes));
    memcpy(copy, (const char *)inbuf + *position, (size_t)num_bytes);
    turn_packed(copy, outcount, datatype, false);
    unpack_elements(copy, num_bytes, outbuf, outcount, datatype);
    free(copy);
    *position += num_bytes;
    return MPI_SUCCESS;
}
