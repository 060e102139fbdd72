/* Steps of reductions, of neighbours, between two groups, in parts, and of objects that are made and asked. */
#pragma once
#include "random_layouts.h"

/* ---- Reductions ---- */

/* Small whole numbers, so that sums are exact in every type and order; pairs of a value and a place. */
static void fill_numbers(MPI_Datatype type, void *into, int count, int of_rank) {
    uint64_t dice = seed ^ mix((uint64_t)step << 32 ^ (uint64_t)of_rank);
    for (int i = 0; i < count; i++) {
        int value = draw(&dice, 7) - (type == MPI_UINT8_T || type == MPI_C_BOOL ? 0 : 3);
        if (type == MPI_SHORT) ((short *)into)[i] = (short)value;
        if (type == MPI_UINT8_T) ((uint8_t *)into)[i] = (uint8_t)value;
        if (type == MPI_FLOAT) ((float *)into)[i] = (float)value;
        if (type == MPI_DOUBLE) ((double *)into)[i] = value;
        if (type == MPI_C_BOOL) ((_Bool *)into)[i] = value > 2;
        if (type == MPI_C_DOUBLE_COMPLEX) ((double *)into)[2 * i] = value, ((double *)into)[2 * i + 1] = 1 - value;
        if (type == MPI_2INT) ((int *)into)[2 * i] = value, ((int *)into)[2 * i + 1] = of_rank;
        if (type == MPI_DOUBLE_INT) {
            struct {
                double value;
                int place;
            } *pairs = into;
            pairs[i].value = value, pairs[i].place = of_rank * 3 % 5;
        }
    }
}

typedef struct {
    MPI_Datatype type;
    MPI_Op op;
} Folding;

static Folding folding(uint64_t *dice) {
    Folding all[] = {{MPI_SHORT, MPI_SUM}, {MPI_SHORT, MPI_BXOR}, {MPI_UINT8_T, MPI_SUM}, {MPI_UINT8_T, MPI_LXOR}, {MPI_UINT8_T, MPI_BOR},
                     {MPI_FLOAT, MPI_SUM}, {MPI_DOUBLE, MPI_MIN}, {MPI_DOUBLE, MPI_PROD}, {MPI_C_BOOL, MPI_LAND}, {MPI_C_BOOL, MPI_LXOR},
                     {MPI_C_DOUBLE_COMPLEX, MPI_SUM}, {MPI_2INT, MPI_MAXLOC}, {MPI_2INT, MPI_MINLOC}, {MPI_DOUBLE_INT, MPI_MINLOC}};
    return all[draw(dice, sizeof all / sizeof *all)];
}

#define MPI_IReduce_ MPI_Ireduce
#define MPI_IReduce_scatter_ MPI_Ireduce_scatter

static void folded(MPI_Comm comm, uint64_t dice) {
    current_kind = "folded";
    Place place = place_in(comm);
    Folding by = folding(&dice);
    Form form = (Form)draw(&dice, 4);
    int which = draw(&dice, 6), root = draw(&dice, place.size), count = (int[]){0, 1, 3, 700}[draw(&dice, 4)];
    int in_place = draw(&dice, 2) && form != PERSISTENT, *shares = calloc((size_t)place.size, sizeof *shares), total = 0;
    MPI_Count *large = calloc((size_t)place.size, sizeof *large);
    for (int i = 0; i < place.size; i++) total += (large[i] = shares[i] = (i % 3) * count / 2);
    int room_for = count * place.size + total, num_bytes = room_for * 16 + 16;
    char *mine = calloc(1, (size_t)num_bytes), *got = calloc(1, (size_t)num_bytes);
    fill_numbers(by.type, mine, room_for, place.rank);
    memset(got, 0x5a, (size_t)num_bytes);
    if (in_place) memcpy(got, mine, (size_t)num_bytes);
    void *given = in_place ? MPI_IN_PLACE : mine;
    if (which == 0) IN_ANY_FORM(Reduce, in_place && place.rank != root ? got : given, got, count, by.type, by.op, root, comm);
    if (which == 1) IN_ANY_FORM(Allreduce, given, got, count, by.type, by.op, comm);
    if (which == 2) IN_ANY_FORM(Scan, given, got, count, by.type, by.op, comm);
    if (which == 3) IN_ANY_FORM(Exscan, given, got, count, by.type, by.op, comm);
    if (which == 4) IN_ANY_FORM(Reduce_scatter_block, given, got, count, by.type, by.op, comm);
    if (which == 5) IN_ANY_FORM(Reduce_scatter, given, got, form == LARGE ? (void *)large : shares, by.type, by.op, comm);
    /* What stands behind a result that was made in place is not defined, nor are the gaps of pairs. */
    MPI_Aint lb, extent;
    int size, seen = which == 5 ? shares[place.rank] : count;
    if ((which == 0 && place.rank != root) || (which == 3 && place.rank == 0)) seen = 0;
    MPI_Type_size(by.type, &size), MPI_Type_get_extent(by.type, &lb, &extent);
    for (int i = 0; i < seen; i++) see_bytes(got + i * extent, size);
    if (!in_place) see_bytes(got + seen * extent, num_bytes - seen * extent);
    free(mine), free(got), free(shares), free(large), drop(comm);
}

/* ---- Neighbours ---- */

#define MPI_INeighbor_allgather_ MPI_Ineighbor_allgather
#define MPI_INeighbor_allgatherv_ MPI_Ineighbor_allgatherv
#define MPI_INeighbor_alltoall_ MPI_Ineighbor_alltoall
#define MPI_INeighbor_alltoallv_ MPI_Ineighbor_alltoallv
#define MPI_INeighbor_alltoallw_ MPI_Ineighbor_alltoallw

typedef struct {
    MPI_Comm comm;
    int num_from, num_to, *from, *to;
} Neighbours;

/* A grid whose borders may be open; no ring of two, where MPIs differ in which block is whose. */
static Neighbours on_grid(uint64_t *dice) {
    Neighbours made = {MPI_COMM_NULL, 0, 0, calloc(8, sizeof(int)), calloc(8, sizeof(int))};
    int dims[2] = {0, 0}, periods[2], dim_count = 1 + draw(dice, 2);
    MPI_Dims_create(world_size, dim_count, dims);
    for (int i = 0; i < dim_count; i++) periods[i] = dims[i] > 2 && draw(dice, 2);
    MPI_Cart_create(MPI_COMM_WORLD, dim_count, dims, periods, 0, &made.comm);
    for (int i = 0; i < dim_count; i++) MPI_Cart_shift(made.comm, i, 1, &made.to[2 * i], &made.to[2 * i + 1]);
    memcpy(made.from, made.to, 8 * sizeof(int));
    made.num_from = made.num_to = 2 * dim_count;
    return made;
}

/* Edges at random, no two alike; each rank tells every size-th of them, or those that are its own. */
static Neighbours on_graph(uint64_t *dice) {
    Neighbours made = {MPI_COMM_NULL, 0, 0, calloc(17, sizeof(int)), calloc(17, sizeof(int))};
    int edges[16][2], num_edges = 0, told = 0, is_weighted, weights[17] = {0};
    for (int drawn = draw(dice, 17); drawn > 0; drawn--) {
        int source = draw(dice, world_size), target = draw(dice, world_size), is_new = 1;
        for (int i = 0; i < num_edges; i++) is_new &= edges[i][0] != source || edges[i][1] != target;
        if (is_new) edges[num_edges][0] = source, edges[num_edges++][1] = target;
    }
    if (draw(dice, 2)) {
        for (int i = world_rank; i < num_edges; i += world_size, told++)
            made.from[told] = edges[i][0], made.to[told] = edges[i][1], weights[told] = 1;
        MPI_Dist_graph_create(MPI_COMM_WORLD, told, made.from, weights, made.to, MPI_UNWEIGHTED, MPI_INFO_NULL, 0, &made.comm);
    } else {
        for (int i = 0; i < num_edges; i++) {
            if (edges[i][1] == world_rank) made.from[made.num_from++] = edges[i][0];
            if (edges[i][0] == world_rank) made.to[made.num_to++] = edges[i][1];
        }
        MPI_Dist_graph_create_adjacent(MPI_COMM_WORLD, made.num_from, made.from, MPI_UNWEIGHTED, made.num_to, made.to, MPI_UNWEIGHTED,
                                       MPI_INFO_NULL, 0, &made.comm);
    }
    MPI_Dist_graph_neighbors_count(made.comm, &made.num_from, &made.num_to, &is_weighted);
    MPI_Dist_graph_neighbors(made.comm, made.num_from, made.from, MPI_UNWEIGHTED, made.num_to, made.to, MPI_UNWEIGHTED);
    return made;
}

/* How many integers go from a rank to another. */
static int ints_along(uint64_t dice, int from, int to) {
    dice ^= mix((uint64_t)(from + 2) << 20 ^ (uint64_t)(to + 2));
    return (int[]){0, 1, 2, 40, 3000}[draw(&dice, 5)];
}

/* What goes along each edge, in which direction, or one number for all; `own`: what each rank gives to all alike. */
static Parts along(Neighbours near, int is_out, int alike, int own, uint64_t dice) {
    int units[17] = {0}, num = is_out ? near.num_to : near.num_from;
    for (int i = 0; i < num; i++) {
        int from = is_out ? world_rank : near.from[i], to = is_out ? near.to[i] : world_rank;
        units[i] = alike >= 0 ? alike : ints_along(dice, from, own ? from : to);
    }
    return parts_of(num, 1, units);
}

/* Where its blocks stand is the order of the MPI; what is in them is not. */
static void see_blocks(int *into, int64_t num_ints, Neighbours near, const MPI_Aint *places, const MPI_Count *counts) {
    int64_t sum = 0, touched = 0;
    for (int i = 0; i < near.num_from; i++) {
        uint64_t one = mix((uint64_t)(near.from[i] + 7));
        for (int64_t k = 0; k < counts[i]; k++) one = mix(one ^ (uint64_t)(unsigned)into[places[i] + k]), into[places[i] + k] = 0x5a5a5a5a;
        sum += (int64_t)one;
    }
    for (int64_t i = 0; i < num_ints; i++) touched += into[i] != 0x5a5a5a5a;
    see((int64_t[]){sum, touched}, 2);
}

#define JUST_COUNTS(parts) form == LARGE ? (void *)parts.large : parts.counts

static void around(uint64_t dice) {
    current_kind = "around";
    Neighbours near = draw(&dice, 2) ? on_grid(&dice) : on_graph(&dice);
    Form form = (Form)draw(&dice, 4);
    int which = draw(&dice, 5), alike = which % 2 ? (int[]){0, 1, 5, 2000}[draw(&dice, 4)] : -1;
    Parts out = along(near, 1, alike, which == 2, dice), in = along(near, 0, alike, which == 2, dice);
    int own = which == 2 ? ints_along(dice, world_rank, world_rank) : alike;
    /* Blocks that are alike stand close together. */
    for (int i = 0; which == 3 && i < near.num_to; i++) out.far[i] = (MPI_Aint)alike * i;
    for (int i = 0; which % 2 && i < near.num_from; i++) in.far[i] = (MPI_Aint)alike * i;
    int64_t num_out = out.total + 3000 + 1, num_in = in.total + 3;
    int *data = malloc((size_t)num_out * sizeof *data), *into = malloc((size_t)num_in * sizeof *into);
    memset(into, 0x5a, (size_t)num_in * sizeof *into);
    for (int64_t i = 0; i < num_out; i++) data[i] = (int)mix(seed ^ (uint64_t)step << 32 ^ (uint64_t)i);
    for (int i = 0; which != 1 && which != 2 && i < near.num_to; i++)
        for (int k = 0; k < out.counts[i]; k++) data[out.far[i] + k] = (int)mix((uint64_t)step << 32 ^ (uint64_t)(near.to[i] + 7) << 16 ^ (uint64_t)k);
    MPI_Datatype types[17];
    MPI_Aint to[17], from[17];
    for (int i = 0; i < 17; i++) types[i] = MPI_INT32_T;
    for (int i = 0; i < near.num_to; i++) to[i] = 4 * out.far[i];
    for (int i = 0; i < near.num_from; i++) from[i] = 4 * in.far[i];
    if (which == 0) IN_ANY_FORM(Neighbor_alltoallv, data, COUNTS_OF(out), MPI_INT32_T, into, COUNTS_OF(in), MPI_INT32_T, near.comm);
    if (which == 1) IN_ANY_FORM(Neighbor_allgather, data, alike, MPI_INT32_T, into, alike, MPI_INT32_T, near.comm);
    if (which == 2) IN_ANY_FORM(Neighbor_allgatherv, data, own, MPI_INT32_T, into, COUNTS_OF(in), MPI_INT32_T, near.comm);
    if (which == 3) IN_ANY_FORM(Neighbor_alltoall, data, alike, MPI_INT32_T, into, alike, MPI_INT32_T, near.comm);
    if (which == 4) IN_ANY_FORM(Neighbor_alltoallw, data, JUST_COUNTS(out), to, types, into, JUST_COUNTS(in), from, types, near.comm);
    see_blocks(into, num_in, near, in.far, in.large);
    free(data), free(into), free(near.from), free(near.to), drop_parts(out), drop_parts(in);
    MPI_Comm_free(&near.comm);
}

/* ---- Between two groups ---- */

static MPI_Comm two_groups(uint64_t *dice, int is_upper, int border) {
    int turned = draw(dice, 2), lower_first = turned ? border - 1 : 0, upper_first = turned ? world_size - 1 : border;
    MPI_Comm half, inter;
    MPI_Comm_split(MPI_COMM_WORLD, is_upper, turned ? -world_rank : world_rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, is_upper ? lower_first : upper_first, 77, &inter);
    MPI_Comm_free(&half);
    return inter;
}

static void between(uint64_t dice) {
    current_kind = "between";
    if (world_size == 1) return;
    int border = 1 + draw(&dice, world_size - 1), is_upper = world_rank >= border, count = (int[]){0, 1, 9, 4000}[draw(&dice, 4)];
    MPI_Comm inter = two_groups(&dice, is_upper, border);
    Place place = place_in(inter);
    Form form = (Form)draw(&dice, 4);
    int which = draw(&dice, 8), roots_side = draw(&dice, 2), far;
    int chosen = draw(&dice, roots_side ? world_size - border : border);
    int root = is_upper != roots_side ? chosen : place.rank == chosen ? MPI_ROOT : MPI_PROC_NULL;
    MPI_Comm_remote_size(inter, &far);
    MPI_Op op = draw(&dice, 2) ? MPI_SUM : MPI_MAX;
    int64_t room_for = (int64_t)count * world_size * world_size, *mine = values(world_rank, room_for), *got = zeros(room_for);
    if (which == 0) IN_ANY_FORM(Bcast, root == MPI_ROOT ? mine : got, count, MPI_INT64_T, root, inter);
    if (which == 1) IN_ANY_FORM(Gather, mine, count, MPI_INT64_T, got, count, MPI_INT64_T, root, inter);
    if (which == 2) IN_ANY_FORM(Scatter, mine, count, MPI_INT64_T, got, count, MPI_INT64_T, root, inter);
    if (which == 3) IN_ANY_FORM(Allgather, mine, count, MPI_INT64_T, got, count, MPI_INT64_T, inter);
    if (which == 4) IN_ANY_FORM(Alltoall, mine, count, MPI_INT64_T, got, count, MPI_INT64_T, inter);
    if (which == 5) IN_ANY_FORM(Reduce, mine, got, count, MPI_INT64_T, op, root, inter);
    if (which == 6) IN_ANY_FORM(Allreduce, mine, got, count, MPI_INT64_T, op, inter);
    /* Both groups have the same number of elements in all. */
    if (which == 7) IN_ANY_FORM(Reduce_scatter_block, mine, got, count * far, MPI_INT64_T, op, inter);
    see(got, room_for);
    MPI_Status status;
    MPI_Request sent;
    MPI_Isend(mine, count, MPI_INT64_T, place.rank % far, 5, inter, &sent);
    for (int i = 0; i < far; i++) {
        if (i % place.size != place.rank) continue;
        MPI_Recv(got, count, MPI_INT64_T, i, 5, inter, &status);
        see(got, count), see((int64_t[]){status.MPI_SOURCE, status.MPI_TAG}, 2);
    }
    MPI_Wait(&sent, MPI_STATUS_IGNORE);
    free(mine), free(got);
    MPI_Comm_free(&inter);
}

/* ---- In parts, of which the receiver has another number ---- */

static void in_parts(MPI_Comm comm, uint64_t dice) {
    current_kind = "in_parts";
    Place place = place_in(comm);
    int shift = draw(&dice, 5), given = 1 + draw(&dice, 6), taken = 1 + draw(&dice, 6), unit = (int[]){0, 1, 7, 900}[draw(&dice, 4)];
    int to = (place.rank + shift) % place.size, from = ((place.rank - shift) % place.size + place.size) % place.size;
    int64_t all = (int64_t)unit * given * taken, *mine = values(place.rank, all), *got = zeros(all);
    MPI_Request both[2];
    MPI_Psend_init(mine, given, (MPI_Count)unit * taken, MPI_INT64_T, to, 5, comm, MPI_INFO_NULL, &both[0]);
    MPI_Precv_init(got, taken, (MPI_Count)unit * given, MPI_INT64_T, from, 5, comm, MPI_INFO_NULL, &both[1]);
    for (int turn = 0; turn < 2; turn++) {
        mine[0] += turn;
        MPI_Startall(2, both);
        if (turn == 0 && given > 1) MPI_Pready_range(0, given / 2 - 1, both[0]);
        for (int part = turn == 0 ? given / 2 : 0; part < given; part++) MPI_Pready_list(1, &part, both[0]);
        for (int part = 0, arrived = 0; part < taken; part += arrived) MPI_Parrived(both[1], part, &arrived);
        MPI_Waitall(2, both, MPI_STATUSES_IGNORE);
        see(got, all);
    }
    MPI_Request_free(&both[0]), MPI_Request_free(&both[1]);
    free(mine), free(got), drop(comm);
}
