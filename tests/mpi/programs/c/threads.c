/* More threads wait inside MPI than there are ways to the lower half: none of them may keep another one out.
 *
 * All threads of rank 0 wait for a message of their own. Rank 1 sends the one of the last thread first, and each other one
 * only when the thread behind it has answered; so threads that have come last are through first.
 */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "gate.h"

enum { NUM_THREADS = 40 };

static int rounds;

static void *answer(void *argument) {
    int tag = (int)(long)argument;
    for (int i = 0; i < rounds; i++) {
        int told;
        MPI_Recv(&told, 1, MPI_INT, 1, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        told += tag;
        MPI_Send(&told, 1, MPI_INT, 1, tag, MPI_COMM_WORLD);
    }
    return NULL;
}

int main(int argc, char **argv) {
    int rank, level;
    long sum = 0;
    rounds = argc > 1 ? atoi(argv[1]) : 1;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    if (level != MPI_THREAD_MULTIPLE) MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0) {
        pthread_t threads[NUM_THREADS];
        for (long i = 0; i < NUM_THREADS; i++) pthread_create(&threads[i], NULL, answer, (void *)i);
        for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
    } else {
        for (int i = 0; i < rounds; i++) {
            if (i == rounds - 1) wait_at_gate();
            for (int tag = NUM_THREADS - 1; tag >= 0; tag--) {
                int told = 1000 * i, heard;
                MPI_Sendrecv(&told, 1, MPI_INT, 0, tag, &heard, 1, MPI_INT, 0, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                if (heard != told + tag) MPI_Abort(MPI_COMM_WORLD, 1);
                sum += heard;
            }
        }
    }
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("answer %ld\n", sum);
    MPI_Finalize();
    return 0;
}
