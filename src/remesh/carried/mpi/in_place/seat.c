/* What mpiexec starts for each rank: it hands its place in the job to the program that waits for one, and stays for as
 * long as that program has it. mpiexec then sees a rank that runs, and one that ends.
 *
 *     seat FOLDER          a socket for each rank lies there: FOLDER/0, FOLDER/1, ...
 *
 * The place is the environment, and the descriptor of the process manager where there is one (PMI_FD). The message: the
 * environment's bytes, each variable with its 0; the descriptor goes along. The other side answers with one byte, the
 * status to end with, when it has left the job; without one the status is 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "seat.h"

extern char **environ;

static const char *find_rank(void) {
    static const char *const names[] = {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) return getenv(names[i]);
    return NULL;
}

static int fail(const char *doing, const char *what) {
    fprintf(stderr, "remesh seat: %s %s: %s\n", doing, what, strerror(errno));
    return 1;
}

int main(int count, char **arguments) {
    const char *rank = find_rank(), *descriptor = getenv("PMI_FD");
    char path[sizeof((struct sockaddr_un *)0)->sun_path];
    if (count != 2 || !rank) return fprintf(stderr, "remesh seat: expected a folder, and a rank in the environment\n"), 2;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", arguments[1], rank) >= sizeof path) {
        errno = ENAMETOOLONG;
        return fail("reaching", arguments[1]);
    }
    int line = reach_seat_line(path);
    if (line < 0) return fail("reaching the program at", path);
    if (!hand_over_seat(line, environ, descriptor ? atoi(descriptor) : -1))
        return fail("handing over to the program at", path);
    unsigned char status = 1;
    while (read(line, &status, 1) < 0 && errno == EINTR) continue;
    return status;
}
