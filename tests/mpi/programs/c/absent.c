/* One rank computes until a file is there, while all others stand in a collective; then it comes, too.
 *
 * `absent KIND FILE` prints `answer` on rank 0 if everybody has got what is due.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ABSENT = 1, MANY = 100000 };

static int rank, size;
static double *mine, *found;

static void expect(double got, double due, const char *what) {
    if (got == due) return;
    fprintf(stderr, "rank %d: %s gives %g, expected %g\n", rank, what, got, due);
    MPI_Abort(MPI_COMM_WORLD, 3);
}

static void expect_all(const double *got, int count, double first, const char *what) {
    for (int i = 0; i < count; i++) expect(got[i], first + size * (double)i, what);
}

static void add(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    for (int i = 0; i < *count; i++) ((double *)inout)[i] += ((double *)in)[i];
}

static void fill(double *to, int count) {
    for (int i = 0; i < count; i++) to[i] = rank + i;
}

/* The sum over all ranks of element i is that of the ranks, and `size` times i. */
static double sum_of_ranks(void) { return size * (size - 1) / 2.0; }

static void do_small(const char *kind) {
    double one = rank, sum = 0;
    if (!strcmp(kind, "barrier")) MPI_Barrier(MPI_COMM_WORLD);
    else MPI_Allreduce(&one, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD), expect(sum, sum_of_ranks(), kind);
}

static void do_sums(const char *kind) {
    fill(mine, MANY);
    if (!strcmp(kind, "in_place")) {
        MPI_Allreduce(MPI_IN_PLACE, mine, MANY, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        memcpy(found, mine, MANY * sizeof *mine);
    } else if (!strcmp(kind, "started")) {
        MPI_Request requests[2];
        double short_one = rank, short_sum = 0;
        MPI_Iallreduce(mine, found, MANY, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &requests[0]);
        MPI_Iallreduce(&short_one, &short_sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD, &requests[1]);
        MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
        expect(short_sum, sum_of_ranks(), kind);
    } else if (!strcmp(kind, "own")) {
        MPI_Op op;
        MPI_Op_create(add, 1, &op);
        MPI_Allreduce(mine, found, MANY, MPI_DOUBLE, op, MPI_COMM_WORLD);
        MPI_Op_free(&op);
    } else {
        MPI_Allreduce(mine, found, MANY, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    }
    expect_all(found, MANY, sum_of_ranks(), kind);
}

/* Short and long, from the absent rank; and one to it and from it of uneven lengths. */
static void do_rooted(const char *kind) {
    int count = !strcmp(kind, "bcast_short") ? 10 : MANY / 10;
    if (!strncmp(kind, "bcast", 5)) {
        for (int i = 0; i < count; i++) mine[i] = rank == ABSENT ? 3.0 * i : 0;
        MPI_Bcast(mine, count, MPI_DOUBLE, ABSENT, MPI_COMM_WORLD);
        for (int i = 0; i < count; i++) expect(mine[i], 3.0 * i, kind);
        return;
    }
    int *counts = malloc(2 * size * sizeof *counts), *starts = counts + size;
    for (int r = 0, start = 0; r < size; start += counts[r++]) counts[r] = 1000 * (r + 1), starts[r] = start;
    if (!strcmp(kind, "allgatherv")) {
        for (int i = 0; i < counts[rank]; i++) mine[i] = rank;
        MPI_Allgatherv(mine, counts[rank], MPI_DOUBLE, found, counts, starts, MPI_DOUBLE, MPI_COMM_WORLD);
    } else {
        for (int i = 0; i < size * counts[rank]; i++) mine[i] = rank;
        for (int r = 0; r < size; r++) starts[r] = r * counts[rank];
        int *from = malloc(2 * size * sizeof *from), *at = from + size, *to = counts;
        for (int r = 0, start = 0; r < size; start += from[r++]) from[r] = counts[r], at[r] = start;
        int *each = malloc(size * sizeof *each);
        for (int r = 0; r < size; r++) each[r] = counts[rank];
        MPI_Alltoallv(mine, each, starts, MPI_DOUBLE, found, from, at, MPI_DOUBLE, MPI_COMM_WORLD);
        memcpy(to, from, size * sizeof *to), memcpy(starts, at, size * sizeof *at);
        free(from), free(each);
    }
    for (int r = 0; r < size; r++)
        for (int i = 0; i < counts[r]; i++) expect(found[starts[r] + i], r, kind);
    free(counts);
}

static void do_communicators(void) {
    for (int i = 0; i < 20; i++) {
        MPI_Comm half;
        MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
        fill(mine, 1000);
        MPI_Allreduce(mine, found, 1000, MPI_DOUBLE, MPI_SUM, half);
        double due = 0, members = 0;
        for (int r = rank % 2; r < size; r += 2) due += r, members++;
        for (int k = 0; k < 1000; k++) expect(found[k], due + members * k, "split");
        MPI_Comm_free(&half);
    }
}

static void do_window(void) {
    MPI_Win win;
    MPI_Win_create(found, size * sizeof *found, sizeof *found, MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    MPI_Win_fence(0, win);
    double one = rank + 1;
    for (int r = 0; r < size; r++) MPI_Put(&one, 1, MPI_DOUBLE, r, rank, 1, MPI_DOUBLE, win);
    MPI_Win_fence(0, win);
    for (int r = 0; r < size; r++) expect(found[r], r + 1, "fence");
    MPI_Win_free(&win);
}

static void do_file(const char *name) {
    char path[4096];
    MPI_File file;
    snprintf(path, sizeof path, "%s.data", name);
    MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
    fill(mine, MANY);
    MPI_Offset start = (MPI_Offset)rank * MANY * (MPI_Offset)sizeof *mine;
    MPI_File_write_at_all(file, start, mine, MANY, MPI_DOUBLE, MPI_STATUS_IGNORE);
    MPI_File_read_at_all(file, start, found, MANY, MPI_DOUBLE, MPI_STATUS_IGNORE);
    for (int i = 0; i < MANY; i++) expect(found[i], rank + i, "write_all");
    MPI_File_close(&file);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *kind = argv[1], *sign = argv[2];
    mine = malloc(size * MANY * sizeof *mine);
    found = malloc(size * MANY * sizeof *found);
    do_sums("before");
    if (rank == ABSENT)
        while (access(sign, F_OK)) continue;
    if (!strcmp(kind, "barrier") || !strcmp(kind, "allreduce")) do_small(kind);
    else if (!strncmp(kind, "bcast", 5) || !strcmp(kind, "allgatherv") || !strcmp(kind, "alltoallv")) do_rooted(kind);
    else if (!strcmp(kind, "split")) do_communicators();
    else if (!strcmp(kind, "fence")) do_window();
    else if (!strcmp(kind, "write_all")) do_file(sign);
    else if (strcmp(kind, "finalize")) do_sums(kind);
    double one = 1, all = 0;
    if (strcmp(kind, "finalize")) MPI_Reduce(&one, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("answer %g\n", all);
    MPI_Finalize();
    return 0;
}
