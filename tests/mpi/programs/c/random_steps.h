/* What programs of random_programs.py are made of: steps that end in a digest of all that a rank got in them. */
#pragma once
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gate.h"

typedef enum { ALLREDUCE, SCAN, EXSCAN, REDUCE_SCATTER_BLOCK, ALLTOALL, ALLGATHER, BCAST } Collective;
typedef enum { BLOCKING, STARTED, PERSISTENT, LARGE } Form;
typedef enum { ALLOCATED, CREATED, SHARED } Memory;
typedef enum { FENCES, LOCKS, PARTNERS } Epoch;
typedef enum { AT, AT_ALL, ORDERED, VIEWED } Access;

static int world_rank, world_size, step, pause_us;
static uint64_t seed, digest;
static MPI_Comm copy, ring;
static MPI_Op first_odd;
static const char *current_kind;

static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Values of a rank in this step: small enough that sums of them are exact. */
static int64_t *values(int of, int64_t count) {
    int64_t *made = malloc((size_t)(count + 1) * sizeof *made);
    for (int64_t i = 0; i < count; i++)
        made[i] = (int64_t)(mix(seed ^ mix((uint64_t)step << 40 ^ (uint64_t)of << 32 ^ (uint64_t)i)) & 0xffffff);
    return made;
}

static int64_t *zeros(int64_t count) { return calloc((size_t)(count + 1), sizeof(int64_t)); }

static void see(const int64_t *got, int64_t count) {
    for (int64_t i = 0; i < count; i++) digest = mix(digest ^ (uint64_t)got[i] ^ (uint64_t)i << 48);
}

/* The first odd one, or the last: what comes first matters, and how it is put together does not. */
static void take_first_odd(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    for (int i = 0; i < *count; i++)
        if (((int64_t *)in)[i] & 1) ((int64_t *)inout)[i] = ((int64_t *)in)[i];
}

/* ---- Communicators ---- */

static MPI_Comm split(int parts, int direction) {
    MPI_Comm made;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % parts, direction * world_rank, &made);
    return made;
}

static MPI_Comm reversed(void) {
    MPI_Group all, turned;
    MPI_Comm made;
    int *ranks = malloc((size_t)world_size * sizeof *ranks);
    for (int i = 0; i < world_size; i++) ranks[i] = world_size - 1 - i;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, world_size, ranks, &turned);
    MPI_Comm_create(MPI_COMM_WORLD, turned, &made);
    MPI_Group_free(&turned);
    MPI_Group_free(&all);
    free(ranks);
    return made;
}

static MPI_Comm shared(void) {
    MPI_Comm made;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, -world_rank, MPI_INFO_NULL, &made);
    return made;
}

static void drop(MPI_Comm comm) {
    if (comm != MPI_COMM_WORLD && comm != copy && comm != ring) MPI_Comm_free(&comm);
}

typedef struct {
    int rank, size;
} Place;
static Place place_in(MPI_Comm comm) {
    Place place;
    MPI_Comm_rank(comm, &place.rank);
    MPI_Comm_size(comm, &place.size);
    return place;
}

/* A persistent one is used twice. */
static void complete(Form form, MPI_Request *request) {
    for (int turn = 0; turn < (form == PERSISTENT ? 2 : 1); turn++) {
        if (form == PERSISTENT) MPI_Start(request);
        MPI_Wait(request, MPI_STATUS_IGNORE);
    }
    if (form == PERSISTENT) MPI_Request_free(request);
}

#define IN_FORM(name, ...)                                                                             \
    do {                                                                                               \
        MPI_Request request_;                                                                          \
        if (form == BLOCKING) MPI_##name(__VA_ARGS__);                                                 \
        else if (form == STARTED) MPI_I##name##_(__VA_ARGS__, &request_), complete(form, &request_);    \
        else MPI_##name##_init(__VA_ARGS__, MPI_INFO_NULL, &request_), complete(form, &request_);      \
    } while (0)
#define MPI_IAllreduce_ MPI_Iallreduce
#define MPI_IScan_ MPI_Iscan
#define MPI_IExscan_ MPI_Iexscan
#define MPI_IReduce_scatter_block_ MPI_Ireduce_scatter_block
#define MPI_IAlltoall_ MPI_Ialltoall
#define MPI_IAllgather_ MPI_Iallgather
#define MPI_IBcast_ MPI_Ibcast
#define MPI_IAlltoallv_ MPI_Ialltoallv

/* ---- Steps ---- */

static void collective(Collective which, Form form, MPI_Comm comm, int count, MPI_Op op, int root) {
    current_kind = "collective";
    Place place = place_in(comm);
    int64_t all = (int64_t)count * place.size, *mine = values(place.rank, all), *got = zeros(all), num_got = count;
    if (which == ALLREDUCE) IN_FORM(Allreduce, mine, got, count, MPI_INT64_T, op, comm);
    else if (which == SCAN) IN_FORM(Scan, mine, got, count, MPI_INT64_T, op, comm);
    else if (which == EXSCAN) IN_FORM(Exscan, mine, got, count, MPI_INT64_T, op, comm);
    else if (which == REDUCE_SCATTER_BLOCK) IN_FORM(Reduce_scatter_block, mine, got, count, MPI_INT64_T, op, comm);
    else if (which == ALLTOALL) IN_FORM(Alltoall, mine, count, MPI_INT64_T, got, count, MPI_INT64_T, comm);
    else if (which == ALLGATHER) IN_FORM(Allgather, mine, count, MPI_INT64_T, got, count, MPI_INT64_T, comm);
    else {
        memcpy(got, mine, (size_t)count * sizeof *got);
        IN_FORM(Bcast, got, count, MPI_INT64_T, root % place.size, comm);
    }
    if (which == ALLTOALL || which == ALLGATHER) num_got = all;
    if (which == EXSCAN && place.rank == 0) num_got = 0; /* not defined */
    see(got, num_got);
    free(mine), free(got), drop(comm);
}

/* To each rank another number of elements, each at a distance of its own. */
static void uneven(Form form, MPI_Comm comm, int count) {
    current_kind = "uneven";
    Place place = place_in(comm);
    int *sent = calloc((size_t)place.size * 4, sizeof *sent), *from = sent + place.size, *taken = from + place.size,
        *to = taken + place.size, start = 0, end = 0;
    for (int i = 0; i < place.size; i++) {
        sent[i] = (place.rank + 2 * i) % 3 * count / 2, taken[i] = (i + 2 * place.rank) % 3 * count / 2;
        from[i] = start, to[i] = end;
        start += sent[i] + 1, end += taken[i] + 2;
    }
    int64_t *mine = values(place.rank, start), *got = zeros(end);
    IN_FORM(Alltoallv, mine, sent, from, MPI_INT64_T, got, taken, to, MPI_INT64_T, comm);
    see(got, end);
    free(mine), free(got), free(sent), drop(comm);
}

/* Even ranks and odd ones, as two groups, then as one. */
static void between_groups(int count, MPI_Op op) {
    current_kind = "between_groups";
    if (world_size == 1) return;
    MPI_Comm half = split(2, 1), inter, both;
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - world_rank % 2, 77, &inter);
    int64_t *mine = values(world_rank, count), *got = zeros(count);
    MPI_Allreduce(mine, got, count, MPI_INT64_T, op, inter);
    see(got, count);
    MPI_Intercomm_merge(inter, world_rank % 2, &both);
    MPI_Allreduce(mine, got, count, MPI_INT64_T, op, both);
    see(got, count);
    free(mine), free(got);
    MPI_Comm_free(&both), MPI_Comm_free(&inter), MPI_Comm_free(&half);
}

/* A graph in which each rank gives to those some places further on. */
static void neighbours(MPI_Comm comm, int count, int degree, const int *shifts) {
    current_kind = "neighbours";
    Place place = place_in(comm);
    int to[4], from[4];
    for (int i = 0; i < degree; i++) {
        to[i] = (place.rank + shifts[i]) % place.size;
        from[i] = ((place.rank - shifts[i]) % place.size + place.size) % place.size;
    }
    MPI_Comm graph;
    MPI_Dist_graph_create_adjacent(comm, degree, from, MPI_UNWEIGHTED, degree, to, MPI_UNWEIGHTED, MPI_INFO_NULL, 0, &graph);
    int64_t *mine = values(place.rank, count), *got = zeros((int64_t)count * degree);
    MPI_Neighbor_allgather(mine, count, MPI_INT64_T, got, count, MPI_INT64_T, graph);
    see(got, (int64_t)count * degree);
    free(mine), free(got), drop(comm);
    MPI_Comm_free(&graph);
}

static void access_window(MPI_Win win, Epoch epoch, const int64_t *mine, int count, int to, int from) {
    MPI_Group all, group_to, group_from;
    int64_t one = mine[0];
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, 1, &to, &group_to);
    MPI_Group_incl(all, 1, &from, &group_from);
    if (epoch == FENCES) MPI_Win_fence(0, win);
    if (epoch == LOCKS) MPI_Win_lock(MPI_LOCK_SHARED, to, 0, win);
    if (epoch == PARTNERS) MPI_Win_post(group_from, 0, win), MPI_Win_start(group_to, 0, win);
    MPI_Put(mine, count, MPI_INT64_T, to, 1, count, MPI_INT64_T, win);
    MPI_Accumulate(&one, 1, MPI_INT64_T, to, 0, 1, MPI_INT64_T, MPI_SUM, win);
    if (epoch == FENCES) MPI_Win_fence(0, win);
    if (epoch == LOCKS) MPI_Win_unlock(to, win);
    if (epoch == PARTNERS) MPI_Win_complete(win), MPI_Win_wait(win);
    MPI_Group_free(&group_to), MPI_Group_free(&group_from), MPI_Group_free(&all);
}

static void window(Memory kind, Epoch epoch, int count, int shift) {
    current_kind = "window";
    int to = (world_rank + shift) % world_size, from = ((world_rank - shift) % world_size + world_size) % world_size;
    MPI_Aint num_bytes = (MPI_Aint)sizeof(int64_t) * (count + 1);
    int64_t *mine = values(world_rank, count), *memory, *created = NULL;
    MPI_Win win;
    if (kind == ALLOCATED) MPI_Win_allocate(num_bytes, 8, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &win);
    if (kind == SHARED) MPI_Win_allocate_shared(num_bytes, 8, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &win);
    if (kind == CREATED) {
        memory = created = zeros(count + 1);
        MPI_Win_create(created, num_bytes, 8, MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    }
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, world_rank, 0, win);
    memory[0] = step;
    MPI_Win_unlock(world_rank, win);
    MPI_Barrier(MPI_COMM_WORLD);
    access_window(win, epoch, mine, count, to, from);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, world_rank, 0, win);
    see(memory, count + 1);
    MPI_Win_unlock(world_rank, win);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_free(&win);
    free(mine), free(created);
}

/* Written in blocks by all ranks, read as a whole by each. */
static void file_of_all(Access access, MPI_Comm comm, int count) {
    current_kind = "file_of_all";
    Place place = place_in(comm);
    char path[64];
    int part;
    MPI_Allreduce(&world_rank, &part, 1, MPI_INT, MPI_MIN, comm);
    snprintf(path, sizeof path, "step-%d-%d.bin", step, part);
    MPI_File file;
    MPI_Offset block = (MPI_Offset)count * 8;
    int64_t all = (int64_t)count * place.size, *mine = values(place.rank, count), *got = zeros(all);
    MPI_File_open(comm, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
    if (access == AT) MPI_File_write_at(file, place.rank * block, mine, count, MPI_INT64_T, MPI_STATUS_IGNORE);
    if (access == AT_ALL) MPI_File_write_at_all(file, place.rank * block, mine, count, MPI_INT64_T, MPI_STATUS_IGNORE);
    if (access == ORDERED) MPI_File_write_ordered(file, mine, count, MPI_INT64_T, MPI_STATUS_IGNORE);
    if (access == VIEWED) {
        MPI_Datatype every;
        MPI_Type_vector(count, 1, place.size, MPI_INT64_T, &every);
        MPI_Type_commit(&every);
        MPI_File_set_view(file, place.rank * 8, MPI_INT64_T, every, "native", MPI_INFO_NULL);
        MPI_File_write_all(file, mine, count, MPI_INT64_T, MPI_STATUS_IGNORE);
        MPI_Type_free(&every);
    }
    MPI_File_close(&file);
    MPI_File_open(comm, path, MPI_MODE_RDONLY | MPI_MODE_DELETE_ON_CLOSE, MPI_INFO_NULL, &file);
    MPI_File_read_at_all(file, 0, got, (int)all, MPI_INT64_T, MPI_STATUS_IGNORE);
    MPI_File_close(&file);
    see(got, all);
    free(mine), free(got), drop(comm);
}

/* One message around a ring, again and again, in parts if it has any. */
static void repeated(MPI_Comm comm, int count, int shift, int turns, int parts) {
    current_kind = "repeated";
    Place place = place_in(comm);
    int to = (place.rank + shift) % place.size, from = ((place.rank - shift) % place.size + place.size) % place.size;
    int64_t all = (int64_t)count * (parts ? parts : 1), *mine = values(place.rank, all), *got = zeros(all);
    MPI_Request both[2];
    if (parts) {
        MPI_Psend_init(mine, parts, count, MPI_INT64_T, to, 5, comm, MPI_INFO_NULL, &both[0]);
        MPI_Precv_init(got, parts, count, MPI_INT64_T, from, 5, comm, MPI_INFO_NULL, &both[1]);
    } else {
        MPI_Send_init(mine, count, MPI_INT64_T, to, 5, comm, &both[0]);
        MPI_Recv_init(got, count, MPI_INT64_T, from, 5, comm, &both[1]);
    }
    for (int turn = 0; turn < turns; turn++) {
        mine[0] += turn;
        MPI_Startall(2, both);
        for (int part = parts; part-- > 0;) MPI_Pready(part, both[0]);
        MPI_Waitall(2, both, MPI_STATUSES_IGNORE);
        see(got, all);
    }
    MPI_Request_free(&both[0]), MPI_Request_free(&both[1]);
    free(mine), free(got), drop(comm);
}

/* ---- The frame ---- */

static void begin(int argc, char **argv, uint64_t chosen) {
    seed = mix(chosen + 1);
    pause_us = argc > 1 ? atoi(argv[1]) : 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    MPI_Cart_create(MPI_COMM_WORLD, 1, &world_size, (int[]){1}, 0, &ring);
    MPI_Op_create(take_first_odd, 0, &first_odd);
}

static void begin_step(int number) { step = number, digest = 0; }

static void end_step(void) {
    printf("rank %d step %d %s %016llx\n", world_rank, step, current_kind, (unsigned long long)digest);
    fflush(stdout);
    usleep((useconds_t)pause_us);
}

static int end(void) {
    if (world_rank == 0) wait_at_gate();
    MPI_Op_free(&first_odd);
    MPI_Comm_free(&ring), MPI_Comm_free(&copy);
    return MPI_Finalize();
}
