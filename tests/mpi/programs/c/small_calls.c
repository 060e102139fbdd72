/* How long do small calls take, as a program sees it? Lines of "name seconds" from rank 0.

       small_calls REPEAT [STAY_S]     medians over batches of REPEAT calls; then it does nothing for so many seconds */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { BATCHES = 9 };

static int rank;

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void ping(void)
{
    char small[8] = {0};
    if (rank == 0) {
        MPI_Send(small, 8, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(small, 8, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
        MPI_Recv(small, 8, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(small, 8, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    }
}

enum { FRAME_BYTES = 48 + 32768, SENT_BYTES = 48 + 8 };
static char frame[FRAME_BYTES];
static MPI_Comm wire;
static MPI_Request coming;

static void give(int other)
{
    char sent[SENT_BYTES] = {0};
    MPI_Request request;
    MPI_Isend(sent, SENT_BYTES, MPI_BYTE, other, 0, wire, &request);
    for (int over = 0; !over;)
        MPI_Test(&request, &over, MPI_STATUS_IGNORE);
}

static void take(void)
{
    for (int over = 0; !over;)
        MPI_Test(&coming, &over, MPI_STATUS_IGNORE);
    MPI_Start(&coming);
}

/* As a lower half does it: nobody blocks, and what comes may be from anybody, behind a header. */
static void ping_unblocked(void)
{
    if (rank == 0)
        give(1);
    if (rank < 2)
        take();
    if (rank == 1)
        give(0);
}

static void measure(const char *name, void (*call)(void), int repeat, double share);

static void measure_unblocked(int repeat)
{
    MPI_Comm_dup(MPI_COMM_WORLD, &wire);
    MPI_Recv_init(frame, FRAME_BYTES, MPI_BYTE, MPI_ANY_SOURCE, 0, wire, &coming);
    MPI_Start(&coming);
    measure("unblocked", ping_unblocked, repeat, 0.5);
    MPI_Cancel(&coming);
    MPI_Wait(&coming, MPI_STATUS_IGNORE);
    MPI_Request_free(&coming);
    MPI_Comm_free(&wire);
}

static void sum(void)
{
    double one = 1, result;
    MPI_Allreduce(&one, &result, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

/* Needs no other rank, but what carries the program. */
static void sum_alone(void)
{
    double one = 1, result;
    MPI_Allreduce(&one, &result, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_SELF);
}

static void ask_rank(void)
{
    int found;
    MPI_Comm_rank(MPI_COMM_WORLD, &found);
}

static void ask_time(void)
{
    MPI_Wtime();
}

static void ask_size(void)
{
    int found;
    MPI_Type_size(MPI_DOUBLE, &found);
}

static int compare(const void *first, const void *second)
{
    double difference = *(const double *)first - *(const double *)second;
    return (difference > 0) - (difference < 0);
}

static void measure(const char *name, void (*call)(void), int repeat, double share)
{
    double found[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = now_s();
        for (int turn = 0; turn < repeat; turn++)
            call();
        found[batch] = (now_s() - start) / repeat * share;
    }
    qsort(found, BATCHES, sizeof *found, compare);
    if (rank == 0)
        printf("%s %.12g\n", name, found[BATCHES / 2]);
}

int main(int count, char **arguments)
{
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int size, repeat = count > 1 ? atoi(arguments[1]) : 1000;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size > 1)
        measure("latency", ping, repeat, 0.5);
    if (size > 1)
        measure_unblocked(repeat);
    measure("allreduce", sum, repeat, 1);
    measure("alone", sum_alone, repeat, 1);
    measure("rank", ask_rank, 100 * repeat, 1);
    measure("time", ask_time, 100 * repeat, 1);
    measure("size", ask_size, 100 * repeat, 1);
    if (count > 2)
        sleep(atoi(arguments[2]));
    MPI_Finalize();
    return 0;
}
