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
