/* Windows of every kind, in every kind of epoch, with every access, against what each rank can work out by itself.
 *
 * `windows ROUNDS` goes through all of it so often; rank 0 prints `answer` at the end, and whoever finds a difference
 * ends the job.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"

enum { ROOM = 64 };

static int rank, size, right_one, left_one, round_number;
static long checked;

static void expect(long found, long expected, const char *what) {
    checked += found;
    if (found == expected) return;
    fprintf(stderr, "%s: rank %d, round %d: %ld, expected %ld\n", what, rank, round_number, found, expected);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static long value(int of, int i) { return 1000L * round_number + 31L * of + i; }

/* Each rank puts into its right neighbour, reads from it, and folds into rank 0. */
static void fences(MPI_Win win, long *memory) {
    long mine[4], read[4];
    for (int i = 0; i < 4; i++) mine[i] = value(rank, i);
    memory[8] = 0;
    MPI_Win_fence(MPI_MODE_NOPRECEDE, win);
    MPI_Put(mine, 4, MPI_LONG, right_one, 0, 4, MPI_LONG, win);
    MPI_Accumulate(mine, 1, MPI_LONG, 0, 8, 1, MPI_LONG, MPI_SUM, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < 4; i++) expect(memory[i], value(left_one, i), "put in a fence");
    MPI_Get(read, 4, MPI_LONG, right_one, 0, 4, MPI_LONG, win);
    MPI_Win_fence(MPI_MODE_NOSUCCEED, win);
    for (int i = 0; i < 4; i++) expect(read[i], value(rank, i), "get in a fence");
    long sum = 0;
    for (int one = 0; one < size; one++) sum += value(one, 0);
    if (rank == 0) expect(memory[8], sum, "accumulate in a fence");
}

/* A column of a matrix becomes a row at the target, and comes back. */
static void derived(MPI_Win win, long *memory) {
    long matrix[16], back[16];
    MPI_Datatype column, every_third;
    MPI_Type_vector(4, 1, 4, MPI_LONG, &column);
    MPI_Type_vector(4, 1, 3, MPI_LONG, &every_third);
    MPI_Type_commit(&column);
    MPI_Type_commit(&every_third);
    for (int i = 0; i < 16; i++) matrix[i] = value(rank, i), back[i] = -1, memory[i] = -2;
    MPI_Win_fence(0, win);
    MPI_Put(matrix + 1, 1, column, right_one, 2, 1, every_third, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < 4; i++) expect(memory[2 + 3 * i], value(left_one, 1 + 4 * i), "put of a column");
    expect(memory[3], -2, "what stands between");
    MPI_Get(back, 1, column, right_one, 2, 4, MPI_LONG, win);
    MPI_Win_fence(0, win);
    expect(back[0], value(rank, 1), "get into a column");
    expect(back[4], -2, "get into a column");
    expect(back[1], -1, "what a column leaves alone");
    MPI_Win_fence(MPI_MODE_NOSUCCEED, win);
    MPI_Type_free(&column);
    MPI_Type_free(&every_third);
}

static void partners(MPI_Win win, long *memory) {
    MPI_Group all, to, from;
    long mine = value(rank, 7);
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, 1, &right_one, &to);
    MPI_Group_incl(all, 1, &left_one, &from);
    memory[5] = 0;
    MPI_Win_post(from, 0, win);
    MPI_Win_start(to, 0, win);
    MPI_Put(&mine, 1, MPI_LONG, right_one, 5, 1, MPI_LONG, win);
    MPI_Win_complete(win);
    if (round_number % 2) {
        MPI_Win_wait(win);
    } else {
        int flag = 0;
        while (!flag) MPI_Win_test(win, &flag);
    }
    expect(memory[5], value(left_one, 7), "put to a partner");
    MPI_Group_free(&all);
    MPI_Group_free(&to);
    MPI_Group_free(&from);
}

/* Everybody counts up at rank 0: by a lock and two accesses, by one access, and by trying. */
static void locks(MPI_Win win, long *memory) {
    long one = 1, seen, old;
    if (rank == 0) memory[10] = memory[11] = memory[12] = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, win);
    MPI_Get(&seen, 1, MPI_LONG, 0, 10, 1, MPI_LONG, win);
    MPI_Win_flush(0, win);
    seen++;
    MPI_Put(&seen, 1, MPI_LONG, 0, 10, 1, MPI_LONG, win);
    MPI_Win_unlock(0, win);
    MPI_Win_lock_all(0, win);
    MPI_Fetch_and_op(&one, &old, MPI_LONG, 0, 11, MPI_SUM, win);
    MPI_Win_flush_local(0, win);
    if (old < 0 || old >= size) expect(old, size - 1, "what fetch-and-op has seen");
    for (long expected = 0;; expected = seen) {
        long wanted = expected + 1;
        MPI_Compare_and_swap(&wanted, &expected, &seen, MPI_LONG, 0, 12, win);
        MPI_Win_flush(0, win);
        if (seen == expected) break;
    }
    MPI_Win_unlock_all(win);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, win);
    long counts[3];
    MPI_Get(counts, 3, MPI_LONG, 0, 10, 3, MPI_LONG, win);
    MPI_Win_unlock(0, win);
    for (int i = 0; i < 3; i++) expect(counts[i], size, "what all have counted");
    MPI_Barrier(MPI_COMM_WORLD);
}

static void requests(MPI_Win win, long *memory) {
    long mine[2] = {value(rank, 1), value(rank, 2)}, read[2], old[2];
    MPI_Request request[2];
    memory[20] = memory[21] = 100;
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock_all(MPI_MODE_NOCHECK, win);
    MPI_Rget_accumulate(mine, 2, MPI_LONG, old, 2, MPI_LONG, right_one, 20, 2, MPI_LONG, MPI_SUM, win, &request[0]);
    MPI_Wait(&request[0], MPI_STATUS_IGNORE);
    expect(old[0], 100, "get-accumulate");
    MPI_Raccumulate(mine, 1, MPI_LONG, right_one, 20, 1, MPI_LONG, MPI_REPLACE, win, &request[0]);
    MPI_Rput(mine, 2, MPI_LONG, right_one, 22, 2, MPI_LONG, win, &request[1]);
    for (int i = 0; i < 2; i++) MPI_Wait(&request[i], MPI_STATUS_IGNORE);
    MPI_Rget(read, 2, MPI_LONG, right_one, 20, 2, MPI_LONG, win, &request[0]);
    MPI_Wait(&request[0], MPI_STATUS_IGNORE);
    expect(read[0], value(rank, 1), "replaced");
    expect(read[1], 100 + value(rank, 2), "accumulated");
    MPI_Get_accumulate(NULL, 0, MPI_LONG, read, 2, MPI_LONG, right_one, 22, 2, MPI_LONG, MPI_NO_OP, win);
    MPI_Win_flush_all(win);
    expect(read[1], value(rank, 2), "read by an accumulate that changes nothing");
    MPI_Win_unlock_all(win);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* More runs than one call of the lower half takes, and more accesses than are pending at once. */
static void many(void) {
    enum { BLOCKS = 3000, PUTS = 5000 };
    long *memory, *mine = calloc(BLOCKS, sizeof *mine);
    MPI_Win win;
    MPI_Datatype scattered;
    MPI_Win_allocate(2 * BLOCKS * sizeof(long), 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &win);
    MPI_Type_vector(BLOCKS, 1, 2, MPI_LONG, &scattered);
    MPI_Type_commit(&scattered);
    for (int i = 0; i < BLOCKS; i++) mine[i] = value(rank, i);
    MPI_Win_fence(0, win);
    MPI_Put(mine, BLOCKS, MPI_LONG, right_one, 0, 1, scattered, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < BLOCKS; i++) expect(memory[2 * i], value(left_one, i), "put of many runs");
    MPI_Get(mine, BLOCKS, MPI_LONG, left_one, 0, 1, scattered, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < BLOCKS; i++) expect(mine[i], value((left_one + size - 1) % size, i), "get of many runs");
    MPI_Win_lock_all(0, win);
    for (int i = 0; i < PUTS; i++) MPI_Put(&mine[i % BLOCKS], 1, MPI_LONG, right_one, 8 * (i % 8), 1, MPI_LONG, win);
    MPI_Win_unlock_all(win);
    MPI_Type_free(&scattered);
    MPI_Win_free(&win);
    free(mine);
}

static void dynamic(void) {
    MPI_Win win;
    MPI_Aint mine, theirs;
    long memory[4] = {0}, sent = value(rank, 9);
    MPI_Win_create_dynamic(MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    MPI_Win_attach(win, memory, sizeof memory);
    MPI_Get_address(memory + 2, &mine);
    MPI_Sendrecv(&mine, 1, MPI_AINT, left_one, 0, &theirs, 1, MPI_AINT, right_one, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Win_fence(0, win);
    MPI_Put(&sent, 1, MPI_LONG, right_one, theirs, 1, MPI_LONG, win);
    MPI_Win_fence(MPI_MODE_NOSUCCEED, win);
    expect(memory[2], value(left_one, 9), "put into attached memory");
    MPI_Win_detach(win, memory);
    MPI_Win_free(&win);
}

static int not_copied(MPI_Win win, int keyval, void *extra, void *attribute, void *copied, int *flag) {
    (void)win, (void)keyval, (void)extra, (void)attribute, (void)copied;
    *flag = 0;
    return MPI_SUCCESS;
}

static int num_deleted;
static int deleted(MPI_Win win, int keyval, void *attribute, void *extra) {
    (void)win, (void)keyval, (void)extra;
    num_deleted += *(int *)attribute;
    return MPI_SUCCESS;
}

static void questions(MPI_Win win, void *memory) {
    void *base;
    MPI_Aint *bytes;
    int *unit, *flavor, flag, seven = 7, keyval, length;
    char name[MPI_MAX_OBJECT_NAME];
    MPI_Win_get_attr(win, MPI_WIN_BASE, &base, &flag);
    expect(base == memory && flag, 1, "MPI_WIN_BASE");
    MPI_Win_get_attr(win, MPI_WIN_SIZE, &bytes, &flag);
    expect((long)*bytes, ROOM * sizeof(long), "MPI_WIN_SIZE");
    MPI_Win_get_attr(win, MPI_WIN_DISP_UNIT, &unit, &flag);
    expect(*unit, sizeof(long), "MPI_WIN_DISP_UNIT");
    MPI_Win_get_attr(win, MPI_WIN_CREATE_FLAVOR, &flavor, &flag);
    expect(*flavor, MPI_WIN_FLAVOR_CREATE, "MPI_WIN_CREATE_FLAVOR");
    MPI_Info info;
    char hint[MPI_MAX_INFO_VAL + 1];
    MPI_Info_create(&info);
    MPI_Info_set(info, "same_size", "true");
    MPI_Win_set_info(win, info);
    MPI_Info_free(&info);
    MPI_Win_get_info(win, &info);
    MPI_Info_get(info, "accumulate_ordering", MPI_MAX_INFO_VAL, hint, &flag);
    expect(flag && !strcmp(hint, "rar,raw,war,waw"), 1, "a hint of which the default is told");
    MPI_Info_get(info, "same_size", MPI_MAX_INFO_VAL, hint, &flag);
    expect(flag && !strcmp(hint, "true"), 1, "a hint that was set");
    MPI_Info_free(&info);
    MPI_Win_set_name(win, "a window");
    MPI_Win_get_name(win, name, &length);
    expect(strcmp(name, "a window"), 0, "name");
    MPI_Win_create_keyval(not_copied, deleted, &keyval, NULL);
    MPI_Win_set_attr(win, keyval, &seven);
    MPI_Win_delete_attr(win, keyval);
    MPI_Win_free_keyval(&keyval);
    expect(num_deleted, 7L * (round_number + 1), "attributes deleted");
}

/* What may not be is an error, and changes nothing. */
static void mistakes(MPI_Win win) {
    long one = 1;
    int error_class;
    MPI_Win_set_errhandler(win, MPI_ERRORS_RETURN);
    MPI_Error_class(MPI_Put(&one, 1, MPI_LONG, 0, 0, 1, MPI_LONG, win), &error_class);
    expect(error_class, MPI_ERR_RMA_SYNC, "put outside an epoch");
    MPI_Error_class(MPI_Win_unlock(0, win), &error_class);
    expect(error_class, MPI_ERR_RMA_SYNC, "unlock without a lock");
    MPI_Win_fence(0, win);
    MPI_Error_class(MPI_Put(&one, 1, MPI_LONG, size, 0, 1, MPI_LONG, win), &error_class);
    expect(error_class, MPI_ERR_RANK, "put to a rank that there is not");
    MPI_Put(&one, 1, MPI_LONG, MPI_PROC_NULL, 0, 1, MPI_LONG, win);
    MPI_Win_fence(MPI_MODE_NOSUCCEED, win);
    MPI_Win_set_errhandler(win, MPI_ERRORS_ARE_FATAL);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    right_one = (rank + 1) % size;
    left_one = (rank + size - 1) % size;
    for (round_number = 0; round_number < rounds; round_number++) {
        if (rank == 0 && round_number == rounds - 1) wait_at_gate();
        long memory[ROOM] = {0};
        MPI_Win win;
        MPI_Win_create(memory, sizeof memory, sizeof(long), MPI_INFO_NULL, MPI_COMM_WORLD, &win);
        fences(win, memory);
        derived(win, memory);
        partners(win, memory);
        locks(win, memory);
        requests(win, memory);
        questions(win, memory);
        mistakes(win);
        MPI_Win_free(&win);
        many();
        dynamic();
    }
    long total;
    MPI_Reduce(&checked, &total, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("answer %ld\n", total);
    MPI_Finalize();
    return 0;
}
