/* Each rank keeps a child that squares numbers behind two pipes, and calls system(); what comes is summed over all ranks.
 *
 * `children ROUNDS PAUSE SIGN`, the pause in us: in one round the shells of system() wait for the file SIGN, and
 * make SIGN.awaited0 and so on.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gate.h"

int main(int argc, char **argv) {
    int rank, to[2], from[2], rounds = atoi(argv[1]), pause_us = atoi(argv[2]);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (pipe(to) || pipe(from)) return 1;
    pid_t child = fork();
    if (!child) {
        close(to[1]);
        for (long number; read(to[0], &number, sizeof number) == sizeof number;) {
            number *= number;
            if (write(from[1], &number, sizeof number) != sizeof number) _exit(1);
        }
        _exit(rank + 3);
    }
    close(to[0]);
    close(from[1]);
    long total = 0;
    for (int round = 0; round < rounds; round++) {
        if (rank == 0 && round == rounds - 1) wait_at_gate();
        char command[4096], *sign = argv[3];
        long number = 10 * round + rank, sum;
        snprintf(command, sizeof command, "sleep 0.0%d; exit %d", pause_us / 10000, round % 7 + rank);
        if (round == 3)
            snprintf(command, sizeof command, "touch %s.awaited%d; until [ -e %s ]; do sleep 0.05; done; exit %d", sign,
                     rank, sign, round % 7 + rank);
        if (write(to[1], &number, sizeof number) != sizeof number) return 2;
        number = WEXITSTATUS(system(command));
        MPI_Allreduce(&number, &sum, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
        if (read(from[0], &number, sizeof number) != sizeof number) return 3;
        total += sum + number;
    }
    close(to[1]);
    int status;
    waitpid(child, &status, 0);
    total += WEXITSTATUS(status);
    long all;
    MPI_Reduce(&total, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (!rank) printf("answer %ld\n", all);
    return MPI_Finalize();
}
