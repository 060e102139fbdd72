/* A thread waits in MPI while it ends, in a destructor of its data, and another thread calls MPI for the first time. */
#include <mpi.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <unistd.h>

static pthread_key_t key;
static sem_t ends;
static int heard[2];

static void hear(int tag) { MPI_Recv(&heard[tag], 1, MPI_INT, 0, tag, MPI_COMM_SELF, MPI_STATUS_IGNORE); }

static void at_end(void *unused) {
    (void)unused;
    sem_post(&ends);
    hear(0);
}

static void *end(void *unused) {
    MPI_Barrier(MPI_COMM_SELF);
    pthread_setspecific(key, &key);
    return unused;
}

static void *begin(void *unused) {
    sem_wait(&ends);
    hear(1);
    return unused;
}

int main(int argc, char **argv) {
    int level, rank;
    pthread_t threads[2];
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    sem_init(&ends, 0, 0);
    pthread_key_create(&key, at_end); /* its destructor runs behind those of MPI */
    pthread_create(&threads[0], NULL, begin, NULL);
    pthread_create(&threads[1], NULL, end, NULL);
    usleep(300000); /* so that both wait in MPI, in most cases */
    for (int tag = 0; tag < 2; tag++) MPI_Send(&(int){tag + 1}, 1, MPI_INT, 0, tag, MPI_COMM_SELF);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    MPI_Finalize();
    if (rank == 0) printf("answer %d %d\n", heard[0], heard[1]);
    return 0;
}
