/* The same small calls as tests/mpi/programs/c/small_calls.c, with the real MPI in the program's own process.
 *
 *     in_place LOWER LIBRARY_PATH REPEAT     medians over batches of REPEAT calls; lines of "name seconds" from rank 0
 */
#include "in_place.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "mpi_calls.h"

extern char **environ;
enum { BATCHES = 9 };
static const MpiCalls *mpi;
static World world;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void send_to(int dest, const char *small) { CROSS("MPI_Send", mpi->send(small, 8, dest, 0)); }
static void receive_from(int source, char *small) { CROSS("MPI_Recv", mpi->receive(small, 8, source, 0, NULL)); }

static void ping(void) {
    char small[8] = {0};
    if (world.rank == 0) send_to(1, small), receive_from(1, small);
    else if (world.rank == 1) receive_from(0, small), send_to(0, small);
}

/* As a receive that a cut may ask to step out. */
static void await_from(int source, char *small) {
    static const _Atomic uint32_t leave;
    uint64_t request;
    Arrival arrival;
    CROSS("MPI_Recv", mpi->start_receive(small, 8, source, 0, &request));
    CROSS("MPI_Recv", mpi->wait(&request, &leave, &arrival));
}

static void ping_stepping(void) {
    char small[8] = {0};
    if (world.rank == 0) send_to(1, small), await_from(1, small);
    else if (world.rank == 1) await_from(0, small), send_to(0, small);
}

static void sum(void) {
    double one = 1, result;
    CROSS("MPI_Allreduce", mpi->sum_doubles(&one, &result, 1));
}

static int compare(const void *first, const void *second) {
    double difference = *(const double *)first - *(const double *)second;
    return (difference > 0) - (difference < 0);
}

static void measure(const char *name, void (*call)(void), int repeat, double share) {
    double found[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        CROSS("MPI_Barrier", mpi->barrier());
        double start = now_s();
        for (int turn = 0; turn < repeat; turn++) call();
        found[batch] = (now_s() - start) / repeat * share;
    }
    qsort(found, BATCHES, sizeof *found, compare);
    if (world.rank == 0) printf("%s %.12g\n", name, found[BATCHES / 2]);
}

int main(int count, char **arguments) {
    const void *functions;
    if (count != 4) return 2;
    double begun = now_s();
    const char *error = load_lower(arguments[1], arguments[2], environ, &functions);
    if (error) return fprintf(stderr, "%s\n", error), 1;
    double loaded = now_s();
    mpi = functions;
    if (CROSS("MPI_Init_thread", mpi->start(0, &world))) return 1;
    if (world.rank == 0) printf("loading %.12g\n", loaded - begun);
    measure("latency", ping, atoi(arguments[3]), 0.5);
    measure("stepping", ping_stepping, atoi(arguments[3]), 0.5);
    measure("allreduce", sum, atoi(arguments[3]), 1);
    CROSS("MPI_Finalize", mpi->finish());
    fflush(stdout);
    error = end_lower();
    return error ? fprintf(stderr, "%s\n", error), 1 : 0;
}
