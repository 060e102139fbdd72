/* Ranks of one host share memory: they load, store, count and pass a token in it without any call of MPI, and reach it by
 * puts, gets and accumulates as well, against what each rank can work out by itself.
 *
 * `shared ROUNDS PAUSE` goes through all of it so often, and sleeps so many us after each round; rank 0 prints
 * `answer` at the end, and whoever finds a difference ends the job.
 */
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "gate.h"

enum { COUNT = 6000, TURNS = 40 };
/* What stands in the part of the first rank before its values. */
enum { COUNTER, TOKEN, NUM_WORDS };

static int rank, size, round_number;

static void expect(long found, long expected, const char *what) {
    if (found == expected) return;
    fprintf(stderr, "%s: rank %d, round %d: %ld, expected %ld\n", what, rank, round_number, found, expected);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static long value(int of, int i) { return 1000L * round_number + 31L * of + i; }

static long *part_of(MPI_Win win, int of, MPI_Aint expected_bytes) {
    MPI_Aint num_bytes;
    int unit;
    long *base;
    MPI_Win_shared_query(win, of, &num_bytes, &unit, &base);
    expect(num_bytes, expected_bytes, "bytes of a part");
    expect(unit, sizeof(long), "unit of a part");
    return base;
}

/* Plain stores are seen by all behind a synchronisation. */
static void store_and_load(MPI_Win win, MPI_Comm comm, long *first) {
    long *mine = first + NUM_WORDS + (long)rank * COUNT;
    MPI_Win_lock_all(0, win);
    for (int i = 0; i < COUNT; i++) mine[i] = value(rank, i);
    MPI_Win_sync(win);
    MPI_Barrier(comm);
    MPI_Win_sync(win);
    for (int of = 0; of < size; of++)
        for (int i = 0; i < COUNT; i++) expect(first[NUM_WORDS + (long)of * COUNT + i], value(of, i), "load");
    MPI_Win_unlock_all(win);
    MPI_Barrier(comm);
}

/* No call of MPI: what one rank has seen of another's stores must be in the memory that both come back with. */
static void pass_token(long *first) {
    volatile long *token = first + TOKEN;
    for (int turn = 0; turn < TURNS; turn++) {
        long wanted = ((long)round_number * TURNS + turn) * size + rank;
        long seen;
        while ((seen = *token) != wanted) {
            if (seen > wanted) expect(seen, wanted, "token");
            sched_yield();
        }
        first[COUNTER]++;
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        *token = wanted + 1;
    }
}

/* The same memory by accesses of MPI. */
static void access_remotely(MPI_Win win, MPI_Comm comm, long *first) {
    int to = (rank + 1) % size;
    long mine[4], read[4], one = 1;
    MPI_Aint shift = to ? 0 : NUM_WORDS;
    for (int i = 0; i < 4; i++) mine[i] = -value(rank, i);
    MPI_Win_fence(0, win);
    MPI_Put(mine, 4, MPI_LONG, to, shift, 4, MPI_LONG, win);
    MPI_Accumulate(&one, 1, MPI_LONG, 0, COUNTER, 1, MPI_LONG, MPI_SUM, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < 4; i++) expect(first[NUM_WORDS + (long)to * COUNT + i], mine[i], "put");
    MPI_Get(read, 4, MPI_LONG, to, shift, 4, MPI_LONG, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < 4; i++) expect(read[i], mine[i], "get");
    MPI_Barrier(comm);
}

/* A window of one round, each part on pages of its own; every second rank gives nothing. */
static void new_window(MPI_Comm comm, MPI_Info apart) {
    MPI_Aint num_bytes = rank % 2 ? 0 : (MPI_Aint)sizeof(long) * (100 + rank);
    long *base;
    MPI_Win win;
    MPI_Win_allocate_shared(num_bytes, sizeof(long), apart, comm, &base, &win);
    for (int i = 0; i < num_bytes / (long)sizeof(long); i++) expect(base[i], 0, "new memory");
    if (num_bytes) base[7] = value(rank, 7);
    MPI_Win_fence(0, win);
    for (int of = 0; of < size; of += 2) {
        long *part = part_of(win, of, (MPI_Aint)sizeof(long) * (100 + of));
        expect((long)((size_t)part % 4096), 0, "pages of its own");
        expect(part[7], value(of, 7), "a part apart");
    }
    MPI_Win_free(&win);
}

/* Parts of nothing on pages of their own are nowhere. */
static void give_nothing(MPI_Comm comm, MPI_Info apart) {
    MPI_Win win;
    long *base;
    MPI_Win_allocate_shared(rank % 2 ? 0 : (MPI_Aint)sizeof(long), sizeof(long), apart, comm, &base, &win);
    for (int of = 0; of < size; of++)
        expect(part_of(win, of, of % 2 ? 0 : (MPI_Aint)sizeof(long)) == NULL, of % 2, "a part of nothing");
    expect(base == NULL, rank % 2, "own part of nothing");
    MPI_Win_free(&win);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 1, pause_us = argc > 2 ? atoi(argv[2]) : 0, world;
    MPI_Init(&argc, &argv);
    MPI_Comm comm;
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &comm);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    expect(size, world, "ranks of one host");
    MPI_Info apart;
    MPI_Info_create(&apart);
    MPI_Info_set(apart, "alloc_shared_noncontig", "true");

    MPI_Win win;
    long *base;
    MPI_Aint num_bytes = (MPI_Aint)sizeof(long) * (COUNT + (rank ? 0 : NUM_WORDS));
    MPI_Win_allocate_shared(num_bytes, sizeof(long), MPI_INFO_NULL, comm, &base, &win);
    long *first = part_of(win, 0, (MPI_Aint)sizeof(long) * (COUNT + NUM_WORDS));
    for (int of = 1; of < size; of++)
        expect(part_of(win, of, (MPI_Aint)sizeof(long) * COUNT) - first, NUM_WORDS + (long)of * COUNT, "in one piece");
    expect(part_of(win, rank, num_bytes) - base, 0, "own part");
    give_nothing(comm, apart);
    for (; round_number < rounds; round_number++) {
        if (rank == 0 && round_number == rounds - 1) wait_at_gate();
        store_and_load(win, comm, first);
        pass_token(first);
        access_remotely(win, comm, first);
        new_window(comm, apart);
        expect(first[COUNTER], (long)(round_number + 1) * size * (TURNS + 1), "counter");
        MPI_Barrier(comm);
        usleep((useconds_t)pause_us);
    }
    if (rank == 0) printf("answer %ld\n", first[COUNTER]);
    MPI_Win_free(&win);
    MPI_Info_free(&apart);
    MPI_Comm_free(&comm);
    MPI_Finalize();
    return 0;
}
