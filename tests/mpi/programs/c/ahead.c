/* One rank computes until a file is there, while all others go through collectives that do not need it to end.
 *
 * `ahead KIND short|long FILE` prints `answer` on rank 0 if everybody has got what is due. Short ones are over on all
 * others before the absent rank comes; of long ones a member may wait.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TIMES = 20, SHORT = 5, LONG = 20000 };

static int rank, size, absent;

static void expect(long got, long due, const char *what) {
    if (got == due) return;
    fprintf(stderr, "rank %d: %s gives %ld, expected %ld\n", rank, what, got, due);
    MPI_Abort(MPI_COMM_WORLD, 3);
}

/* What rank r gives the n-th time, at place i. */
static long given(int r, int n, int i) { return 1000L * n + 10L * r + i; }

static long sum_up_to(int last, int n, int i) {
    long sum = 0;
    for (int r = 0; r <= last; r++) sum += given(r, n, i);
    return sum;
}

/* Whoever is absent gives nothing that another one waits for: it is a leaf, the root of what is gathered, the last. */
static void run(const char *kind, int n, int count, long *mine, long *found) {
    for (int i = 0; i < size * count; i++) mine[i] = given(rank, n, i % count), found[i] = -1;
    if (!strcmp(kind, "bcast")) {
        MPI_Bcast(mine, count, MPI_LONG, 0, MPI_COMM_WORLD);
        for (int i = 0; i < count; i++) expect(mine[i], given(0, n, i), kind);
    } else if (!strcmp(kind, "scatter") || !strcmp(kind, "scatterv")) {
        int counts[size], starts[size];
        for (int r = 0; r < size; r++) counts[r] = r == 1 ? 0 : count, starts[r] = r * count;
        for (int i = 0; i < size * count; i++) mine[i] = given(i / count, n, i % count);
        if (kind[7]) MPI_Scatterv(mine, counts, starts, MPI_LONG, found, counts[rank], MPI_LONG, 0, MPI_COMM_WORLD);
        else MPI_Scatter(mine, count, MPI_LONG, found, count, MPI_LONG, 0, MPI_COMM_WORLD);
        for (int i = 0; i < (kind[7] ? counts[rank] : count); i++) expect(found[i], given(rank, n, i), kind);
    } else if (!strcmp(kind, "gather")) {
        MPI_Gather(mine, count, MPI_LONG, found, count, MPI_LONG, absent, MPI_COMM_WORLD);
        for (int i = 0; rank == absent && i < size * count; i++) expect(found[i], given(i / count, n, i % count), kind);
    } else if (!strcmp(kind, "reduce")) {
        MPI_Reduce(mine, found, count, MPI_LONG, MPI_SUM, absent, MPI_COMM_WORLD);
        for (int i = 0; rank == absent && i < count; i++) expect(found[i], sum_up_to(size - 1, n, i), kind);
    } else if (!strcmp(kind, "scan")) {
        MPI_Scan(mine, found, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < count; i++) expect(found[i], sum_up_to(rank, n, i), kind);
    } else {
        MPI_Exscan(mine, found, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; rank && i < count; i++) expect(found[i], sum_up_to(rank - 1, n, i), kind);
    }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    absent = size - 1;
    int count = strcmp(argv[2], "long") ? SHORT : LONG;
    long *mine = malloc(2 * size * count * sizeof *mine), *found = mine + size * count;
    volatile long spent = 0;
    if (rank == absent)
        while (access(argv[3], F_OK)) spent++;
    for (int n = 0; n < TIMES; n++) run(argv[1], n, count, mine, found);
    if (rank == 0 && count == SHORT) {
        FILE *ahead = fopen(argv[4], "w");
        if (ahead) fclose(ahead);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("answer %d\n", TIMES);
    free(mine);
    MPI_Finalize();
    return 0;
}
