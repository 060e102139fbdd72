/* Steps in which data go out of one datatype into another, both made by chance: messages and collectives. */
#pragma once
#include "random_steps.h"

/* Of 32-bit integers, whose number in one element is known; no two of them stand in one place. */
typedef struct {
    MPI_Datatype type;
    int ints;
} Layout;

/* Elements of a layout, with bytes around them that nobody may touch. */
typedef struct {
    char *raw, *at;
    int64_t num_bytes;
} Room;

static const int _MARGIN = 64;

static int draw(uint64_t *dice, int below) {
    *dice = mix(*dice + 0x9E3779B97F4A7C15u);
    return (int)((*dice >> 33) % (uint64_t)below);
}

static void see_bytes(const char *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++) digest = mix(digest ^ (uint64_t)(unsigned char)bytes[i] ^ (uint64_t)i << 40);
}

/* ---- Layouts ---- */

/* Blocks of at most three elements in an order of their own, some of them empty, some before the beginning. */
static Layout in_blocks(uint64_t *dice, Layout of, MPI_Aint extent) {
    int lengths[3], starts[3], turn = draw(dice, 3), before = draw(dice, 6), same = 1 + draw(dice, 3), total = 0;
    MPI_Aint addresses[3];
    Layout made;
    for (int i = 0; i < 3; i++) {
        lengths[i] = draw(dice, 4), total += lengths[i];
        starts[i] = (i + turn) % 3 * 4 - before;
        addresses[i] = starts[i] * extent + 4 * draw(dice, 2);
    }
    int which = draw(dice, 5);
    made.ints = (which == 2 || which == 3 ? 3 * same : total) * of.ints;
    if (which == 0) MPI_Type_indexed(3, lengths, starts, of.type, &made.type);
    if (which == 1) MPI_Type_create_hindexed(3, lengths, addresses, of.type, &made.type);
    if (which == 2) MPI_Type_create_indexed_block(3, same, starts, of.type, &made.type);
    if (which == 3) MPI_Type_create_hindexed_block(3, same, addresses, of.type, &made.type);
    if (which == 4) MPI_Type_create_struct(3, lengths, addresses, (MPI_Datatype[]){of.type, of.type, of.type}, &made.type);
    return made;
}

static Layout of_array(uint64_t *dice, Layout of) {
    int sizes[2] = {3, 4}, parts[2] = {1 + draw(dice, 3), 1 + draw(dice, 4)};
    int starts[2] = {draw(dice, 4 - parts[0]), draw(dice, 5 - parts[1])};
    int order = draw(dice, 2) ? MPI_ORDER_C : MPI_ORDER_FORTRAN;
    Layout made = {MPI_DATATYPE_NULL, parts[0] * parts[1] * of.ints};
    if (draw(dice, 2)) MPI_Type_create_subarray(2, sizes, parts, starts, order, of.type, &made.type);
    else {
        int kinds[2] = {MPI_DISTRIBUTE_CYCLIC, MPI_DISTRIBUTE_BLOCK}, width[2] = {1, MPI_DISTRIBUTE_DFLT_DARG};
        MPI_Type_create_darray(4, draw(dice, 4), 2, (int[]){4, 6}, kinds, width, (int[]){2, 2}, order, of.type, &made.type);
        made.ints = 6 * of.ints;
    }
    return made;
}

/* One constructor around another layout, which is freed. */
static Layout wrapped(uint64_t *dice, Layout of) {
    int count = draw(dice, 4), length = draw(dice, 4), stride = length + draw(dice, 3);
    MPI_Aint lb, extent;
    Layout made = {MPI_DATATYPE_NULL, count * length * of.ints};
    MPI_Type_get_extent(of.type, &lb, &extent);
    if (!draw(dice, 4)) stride = -stride;
    int which = draw(dice, 8);
    if (which == 0) MPI_Type_contiguous(count, of.type, &made.type), made.ints = count * of.ints;
    if (which == 1) MPI_Type_vector(count, length, stride, of.type, &made.type);
    if (which == 2) MPI_Type_create_hvector(count, length, stride * (extent + 4), of.type, &made.type);
    if (which == 3) {
        MPI_Type_create_resized(of.type, lb - 4 * draw(dice, 4), extent + 4 * draw(dice, 9), &made.type);
        made.ints = of.ints;
    }
    if (which == 4) made = of_array(dice, of);
    if (which == 5) MPI_Type_dup(of.type, &made.type), made.ints = of.ints;
    if (which > 5) made = in_blocks(dice, of, extent);
    if (of.type != MPI_INT32_T) MPI_Type_free(&of.type);
    return made;
}

/* It may have nothing at all in it. */
static Layout any_layout(uint64_t *dice) {
    Layout made = {MPI_INT32_T, 1};
    for (int depth = draw(dice, 3); depth >= 0; depth--) made = wrapped(dice, made);
    MPI_Type_commit(&made.type);
    return made;
}

static Layout layout(uint64_t *dice) {
    Layout made = any_layout(dice);
    while (made.ints == 0 || made.ints > 200) {
        MPI_Type_free(&made.type);
        made = any_layout(dice);
    }
    return made;
}

/* Of two layouts: how many integers fill elements of both. */
static int common(Layout one, Layout other) {
    int a = one.ints, b = other.ints;
    while (b) {
        int rest = a % b;
        a = b, b = rest;
    }
    return one.ints / a * other.ints;
}

/* For elements from the first to before the last; the numbers of a rank, or what is there before a receive. */
static Room room_from(Layout of, int64_t first, int64_t last, int of_rank) {
    MPI_Aint lb, extent, true_lb, true_extent;
    MPI_Type_get_extent(of.type, &lb, &extent);
    MPI_Type_get_true_extent(of.type, &true_lb, &true_extent);
    int64_t ends[4] = {0, true_lb + true_extent, first * extent + true_lb, (last - 1) * extent + true_lb + true_extent};
    int64_t low = 0, high = 0;
    for (int i = 0; i < 4; i++) low = ends[i] < low ? ends[i] : low, high = ends[i] > high ? ends[i] : high;
    low -= _MARGIN, high += _MARGIN;
    Room room = {malloc((size_t)(high - low)), NULL, high - low};
    for (int64_t i = 0; i < high - low; i++)
        room.raw[i] = of_rank < 0 ? 0x5a : (char)mix(seed ^ (uint64_t)step << 32 ^ (uint64_t)of_rank << 24 ^ (uint64_t)i);
    room.at = room.raw - low;
    return room;
}

static Room room(Layout of, int64_t count, int of_rank) { return room_from(of, 0, count, of_rank); }

static void see_room(Room room) {
    see_bytes(room.raw, room.num_bytes);
    free(room.raw);
}

static void see_status(MPI_Status *status, Layout of) {
    int count = 0, elements = 0;
    MPI_Count large = 0;
    MPI_Get_elements(status, of.type, &elements);
    MPI_Get_elements_c(status, of.type, &large);
    if (of.ints) MPI_Get_count(status, of.type, &count);
    see((int64_t[]){status->MPI_SOURCE, status->MPI_TAG, elements, large, count}, 5);
}

static void see_layout(Layout of) {
    MPI_Aint lb, extent, true_lb, true_extent;
    int size;
    MPI_Type_get_extent(of.type, &lb, &extent);
    MPI_Type_get_true_extent(of.type, &true_lb, &true_extent);
    MPI_Type_size(of.type, &size);
    see((int64_t[]){lb, extent, true_lb, true_extent, size}, 5);
}

/* ---- Messages ---- */

typedef struct {
    Layout given, taken;
    int num_given, num_taken, to, from;
} Letter;

static void pass(int way, Letter the, const char *data, char *into, MPI_Comm comm, MPI_Status *status) {
    MPI_Request both[2];
    MPI_Message message;
    MPI_Status statuses[2];
    if (way == 0)
        MPI_Sendrecv(data, the.num_given, the.given.type, the.to, 9, into, the.num_taken, the.taken.type, the.from, 9, comm, status);
    if (way == 1)
        MPI_Sendrecv_c(data, the.num_given, the.given.type, the.to, 9, into, the.num_taken, the.taken.type, the.from, 9, comm, status);
    if (way == 2 || way == 3) {
        MPI_Irecv_c(into, the.num_taken, the.taken.type, the.from, 9, comm, &both[0]);
        if (way == 2) MPI_Isend(data, the.num_given, the.given.type, the.to, 9, comm, &both[1]);
        else MPI_Issend_c(data, the.num_given, the.given.type, the.to, 9, comm, &both[1]);
        MPI_Waitall(2, both, statuses);
        *status = statuses[0];
    }
    if (way == 4) {
        MPI_Send_init_c(data, the.num_given, the.given.type, the.to, 9, comm, &both[0]);
        MPI_Recv_init(into, the.num_taken, the.taken.type, the.from, 9, comm, &both[1]);
        for (int turn = 0; turn < 2; turn++) MPI_Startall(2, both), MPI_Waitall(2, both, statuses);
        *status = statuses[1];
        MPI_Request_free(&both[0]), MPI_Request_free(&both[1]);
    }
    if (way == 5) {
        MPI_Isend(data, the.num_given, the.given.type, the.to, 9, comm, &both[0]);
        MPI_Mprobe(the.from, 9, comm, &message, status);
        see_status(status, the.taken);
        MPI_Mrecv(into, the.num_taken, the.taken.type, &message, status);
        MPI_Wait(&both[0], MPI_STATUS_IGNORE);
    }
    if (way == 6) { /* MPICH fills no status for it */
        MPI_Isendrecv(data, the.num_given, the.given.type, the.to, 9, into, the.num_taken, the.taken.type, the.from, 9, comm, both);
        MPI_Wait(both, MPI_STATUS_IGNORE);
    }
}

/* Around a ring; the receiver has room for more than comes. */
static void laid_message(MPI_Comm comm, uint64_t dice) {
    current_kind = "laid_message";
    Place place = place_in(comm);
    int shift = draw(&dice, 7), is_empty = !draw(&dice, 6), way = draw(&dice, 7);
    Letter the = {is_empty ? any_layout(&dice) : layout(&dice), layout(&dice), 0, 0, 0, 0};
    int units = (int[]){0, 1, 2, 9, 60}[draw(&dice, 5)];
    the.to = (place.rank + shift) % place.size;
    the.from = ((place.rank - shift) % place.size + place.size) % place.size;
    the.num_given = the.given.ints ? units * (common(the.given, the.taken) / the.given.ints) : units;
    the.num_taken = the.given.ints ? units * (common(the.given, the.taken) / the.taken.ints) + draw(&dice, 3) : draw(&dice, 3);
    Room data = room(the.given, the.num_given, place.rank), into = room(the.taken, the.num_taken, -1);
    MPI_Status status;
    pass(way, the, data.at, into.at, comm, &status);
    if (way < 6) see_status(&status, the.taken);
    see_layout(the.taken), see_room(into);
    if (the.given.ints) see_layout(the.given);
    free(data.raw), MPI_Type_free(&the.given.type), MPI_Type_free(&the.taken.type), drop(comm);
}

/* ---- Collectives ---- */

#define IN_ANY_FORM(name, ...)                        \
    do {                                              \
        if (form == LARGE) MPI_##name##_c(__VA_ARGS__); \
        else IN_FORM(name, __VA_ARGS__);              \
    } while (0)
#define MPI_IGather_ MPI_Igather
#define MPI_IScatter_ MPI_Iscatter
#define MPI_IGatherv_ MPI_Igatherv
#define MPI_IScatterv_ MPI_Iscatterv
#define MPI_IAllgatherv_ MPI_Iallgatherv
#define MPI_IAlltoallw_ MPI_Ialltoallw

/* The same number of elements for each rank. */
static void laid_even(MPI_Comm comm, uint64_t dice) {
    current_kind = "laid_even";
    Place place = place_in(comm);
    Layout given = layout(&dice), taken = layout(&dice);
    Form form = (Form)draw(&dice, 4);
    int which = draw(&dice, 5), root = draw(&dice, place.size);
    int units = (int[]){0, 1, 3, 40}[draw(&dice, 4)], whole = common(given, taken);
    int sent = units * (whole / given.ints), got = units * (whole / taken.ints);
    Room data = room(given, (int64_t)sent * place.size, place.rank), into = room(taken, (int64_t)got * place.size, -1);
    if (which == 0) IN_ANY_FORM(Gather, data.at, sent, given.type, into.at, got, taken.type, root, comm);
    if (which == 1) IN_ANY_FORM(Scatter, data.at, sent, given.type, into.at, got, taken.type, root, comm);
    if (which == 2) IN_ANY_FORM(Allgather, data.at, sent, given.type, into.at, got, taken.type, comm);
    if (which == 3) IN_ANY_FORM(Alltoall, data.at, sent, given.type, into.at, got, taken.type, comm);
    if (which == 4 && place.rank == root) IN_ANY_FORM(Bcast, data.at, sent, given.type, root, comm);
    if (which == 4 && place.rank != root) IN_ANY_FORM(Bcast, into.at, got, taken.type, root, comm);
    see_room(into);
    free(data.raw), MPI_Type_free(&given.type), MPI_Type_free(&taken.type), drop(comm);
}

/* What each rank has for each other one, in elements of a layout, with gaps between, the last rank's first. */
typedef struct {
    int *counts, *places;
    MPI_Count *large;
    MPI_Aint *far;
    int total;
} Parts;

static Parts parts_of(int size, int unit, const int *units) {
    Parts made = {calloc((size_t)size, sizeof(int)), calloc((size_t)size, sizeof(int)), calloc((size_t)size, sizeof(MPI_Count)),
                  calloc((size_t)size, sizeof(MPI_Aint)), 0};
    for (int i = size; i-- > 0;) {
        made.large[i] = made.counts[i] = units[i] * unit;
        made.far[i] = made.places[i] = made.total;
        made.total += made.counts[i] + i % 2;
    }
    return made;
}

static void drop_parts(Parts parts) { free(parts.counts), free(parts.places), free(parts.large), free(parts.far); }

/* How many units go from a rank to another; often none. */
static int units_between(uint64_t dice, int from, int to) {
    dice ^= mix((uint64_t)from << 20 ^ (uint64_t)to);
    return (int[]){0, 0, 1, 2, 15}[draw(&dice, 5)];
}

static void laid_uneven(MPI_Comm comm, uint64_t dice) {
    current_kind = "laid_uneven";
    Place place = place_in(comm);
    Layout given = layout(&dice), taken = layout(&dice);
    Form form = (Form)draw(&dice, 4);
    int which = draw(&dice, 4), root = draw(&dice, place.size), whole = common(given, taken);
    int *from_me = calloc((size_t)place.size * 3, sizeof *from_me), *to_me = from_me + place.size, *each = to_me + place.size;
    for (int i = 0; i < place.size; i++) {
        from_me[i] = units_between(dice, place.rank, i), to_me[i] = units_between(dice, i, place.rank);
        each[i] = units_between(dice, i, i);
    }
    Parts sent = parts_of(place.size, whole / given.ints, which == 3 ? from_me : each);
    Parts got = parts_of(place.size, whole / taken.ints, which == 3 ? to_me : each);
    int mine = each[place.rank] * (whole / given.ints), my_share = each[place.rank] * (whole / taken.ints);
    Room data = room(given, sent.total, place.rank), into = room(taken, got.total, -1);
#define COUNTS_OF(parts) form == LARGE ? (void *)parts.large : parts.counts, form == LARGE ? (void *)parts.far : parts.places
    if (which == 0) IN_ANY_FORM(Gatherv, data.at, mine, given.type, into.at, COUNTS_OF(got), taken.type, root, comm);
    if (which == 1) IN_ANY_FORM(Scatterv, data.at, COUNTS_OF(sent), given.type, into.at, my_share, taken.type, root, comm);
    if (which == 2) IN_ANY_FORM(Allgatherv, data.at, mine, given.type, into.at, COUNTS_OF(got), taken.type, comm);
    if (which == 3) IN_ANY_FORM(Alltoallv, data.at, COUNTS_OF(sent), given.type, into.at, COUNTS_OF(got), taken.type, comm);
    see_room(into);
    free(data.raw), free(from_me), drop_parts(sent), drop_parts(got);
    MPI_Type_free(&given.type), MPI_Type_free(&taken.type), drop(comm);
}

/* Another layout for each pair of ranks, which both of them draw. */
static void laid_each(MPI_Comm comm, uint64_t dice) {
    current_kind = "laid_each";
    Place place = place_in(comm);
    Form form = (Form)draw(&dice, 4);
    int size = place.size;
    size_t room_for = (size_t)size;
    MPI_Datatype *given = calloc(room_for, sizeof *given), *taken = calloc(room_for, sizeof *taken);
    int *sent = calloc(room_for, sizeof *sent), *got = calloc(room_for, sizeof *got);
    int *from = calloc(room_for, sizeof *from), *to = calloc(room_for, sizeof *to);
    char *data = malloc(room_for * 65536), *into = malloc(room_for * 65536);
    for (int64_t i = 0; i < (int64_t)room_for * 65536; i++)
        data[i] = (char)mix(seed ^ (uint64_t)step << 32 ^ (uint64_t)place.rank << 24 ^ (uint64_t)i), into[i] = 0x5a;
    for (int i = 0; i < size; i++) {
        uint64_t there = dice ^ mix((uint64_t)place.rank << 20 ^ (uint64_t)i), back = dice ^ mix((uint64_t)i << 20 ^ (uint64_t)place.rank);
        Layout out = layout(&there), in = layout(&back);
        given[i] = out.type, taken[i] = in.type;
        sent[i] = draw(&there, 3), got[i] = draw(&back, 3);
        from[i] = to[i] = i * 65536 + 32768;
    }
    if (form == LARGE) {
        MPI_Count *large = calloc(room_for * 2, sizeof *large);
        MPI_Aint *far = calloc(room_for, sizeof *far);
        for (int i = 0; i < size; i++) large[i] = sent[i], large[size + i] = got[i], far[i] = from[i];
        MPI_Alltoallw_c(data, large, far, given, into, large + size, far, taken, comm);
        free(large), free(far);
    } else IN_FORM(Alltoallw, data, sent, from, given, into, got, to, taken, comm);
    see_bytes(into, (int64_t)room_for * 65536);
    for (int i = 0; i < size; i++) MPI_Type_free(&given[i]), MPI_Type_free(&taken[i]);
    free(given), free(taken), free(sent), free(got), free(from), free(to), free(data), free(into), drop(comm);
}
