/* A token goes round, and a sum is taken on each lap, while a message is on its way: `ring LAPS PAUSE`, the pause in s. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "gate.h"

enum { MODULUS = 1000003 };

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int laps = atoi(argv[1]), pause_us = (int)(1e6 * atof(argv[2])), rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    long token = rank + 1, seen = 0, value, total;
    MPI_Request behind = MPI_REQUEST_NULL;
    for (int lap = 0; lap < laps; lap++) {
        if (rank == 0 && lap == laps - 1) wait_at_gate();
        MPI_Send(&token, 1, MPI_LONG, (rank + 1) % size, 1, MPI_COMM_WORLD);
        if (lap) {
            MPI_Wait(&behind, MPI_STATUS_IGNORE);
            token = (token * 31 + value) % MODULUS;
        }
        MPI_Irecv(&value, 1, MPI_LONG, (rank + size - 1) % size, 1, MPI_COMM_WORLD, &behind);
        MPI_Allreduce(&token, &total, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        seen = (seen * 31 + token * 7 + total) % MODULUS;
        usleep(pause_us);
    }
    MPI_Wait(&behind, MPI_STATUS_IGNORE);
    long all;
    MPI_Reduce(&seen, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("answer %ld\n", all);
    return MPI_Finalize();
}
