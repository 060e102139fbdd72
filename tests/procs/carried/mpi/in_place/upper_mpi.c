/* A program whose MPI is taken away and given back, as another MPI, while it runs: upper_mpi RANK STAY..., a STAY being
 * FOLDER LOWER LIBRARY_PATH. In each stay: a ring and a sum, long messages, and threads that a timer interrupts.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "audit.h"
#include "in_place.h"
#include "mpi_calls.h"
#include "seat.h"

enum { NUM_THREADS = 2, NUM_TURNS = 20, LONG_BYTES = 3 << 20 };
static const MpiCalls *mpi;
static World world;
static uint64_t sum;

static _Noreturn void fail(int line, const char *condition) {
    fprintf(stderr, "rank %d, line %d: %s\n", world.rank, line, condition);
    _exit(1);
}
#define MUST(condition) ((condition) ? (void)0 : fail(__LINE__, #condition))

static int send_bytes(const void *data, int64_t num_bytes, int dest, int tag) { return CROSS("MPI_Send", mpi->send(data, num_bytes, dest, tag)); }
static Arrival receive_bytes(void *at, int64_t room, int source, int tag) {
    Arrival arrival;
    int error = CROSS("MPI_Recv", mpi->receive(at, room, source, tag, &arrival));
    MUST(error == 0);
    return arrival;
}

static void ring(void) {
    int right = (world.rank + 1) % world.size, left = (world.rank + world.size - 1) % world.size;
    for (int i = 0; i < 200; i++) {
        uint64_t got;
        if (world.rank == 0) MUST(send_bytes(&sum, 8, right, 1) == 0);
        Arrival arrival = receive_bytes(&got, 8, i % 2 ? left : ANY_RANK, i % 3 ? 1 : ANY_LABEL);
        MUST(arrival.source == left && arrival.tag == 1 && arrival.num_bytes == 8);
        if (world.rank != 0) MUST(send_bytes(&sum, 8, right, 1) == 0);
        sum = sum * 31 + got + (uint64_t)i;
        double mine = (double)(sum % 1000003), all;
        MUST(CROSS("MPI_Allreduce", mpi->sum_doubles(&mine, &all, 1)) == 0);
        sum += (uint64_t)all;
    }
}

/* A long message that nobody expects, and its answer, by requests and probes. */
static void long_messages(void) {
    unsigned char *data = malloc(LONG_BYTES), *got = malloc(LONG_BYTES);
    uint64_t out = 0, in = 0, message = 0;
    Arrival arrival = {0, 0, 0, false, false};
    for (int i = 0; i < LONG_BYTES; i++) data[i] = (unsigned char)((uint64_t)i * (sum | 1) >> 8);
    int peer = world.rank ^ 1;
    MUST(CROSS("MPI_Isend", mpi->start_send(data, LONG_BYTES, peer, 2, world.rank, &out)) == 0 && out);
    while (!arrival.is_there) MUST(CROSS("MPI_Improbe", mpi->probe(peer, 2, &arrival, &message)) == 0);
    MUST(arrival.num_bytes == LONG_BYTES && message);
    MUST(CROSS("MPI_Mrecv", mpi->receive_probed(got, LONG_BYTES, &message, &arrival)) == 0 && !message);
    while (out) MUST(CROSS("MPI_Test", mpi->test(&out, &arrival)) == 0);
    for (int i = 0; i < LONG_BYTES; i += 4096) sum = sum * 31 + got[i];
    MUST(CROSS("MPI_Irecv", mpi->start_receive(got, 8, peer, 3, &in)) == 0 && in);
    MUST(CROSS("MPI_Cancel", mpi->cancel(in)) == 0);
    do MUST(CROSS("MPI_Test", mpi->test(&in, &arrival)) == 0);
    while (in);
    MUST(arrival.is_cancelled);
    free(data), free(got);
}

static _Atomic uint32_t leave;
static void *ask_to_leave(void *nothing) {
    usleep(1000);
    leave = 1;
    return nothing;
}

/* A receive that waits steps out when it is asked to, and goes on later. */
static void stepping_out(void) {
    int peer = world.rank ^ 1;
    uint64_t request, own = sum, got = 0;
    Arrival arrival;
    pthread_t thread;
    leave = 0;
    MUST(CROSS("MPI_Irecv", mpi->start_receive(&got, 8, peer, 4, &request)) == 0);
    MUST(pthread_create(&thread, NULL, ask_to_leave, NULL) == 0);
    MUST(CROSS("MPI_Wait", mpi->wait(&request, &leave, &arrival)) == 0 && request && !arrival.is_there);
    MUST(pthread_join(thread, NULL) == 0);
    MUST(CROSS("MPI_Barrier", mpi->barrier()) == 0);
    MUST(send_bytes(&own, 8, peer, 4) == 0);
    leave = 0;
    MUST(CROSS("MPI_Wait", mpi->wait(&request, &leave, &arrival)) == 0 && !request && arrival.num_bytes == 8);
    sum = sum * 31 + got;
}

static long num_handled;
static _Thread_local long handled;
static void on_timer(int number) {
    char text[32];
    snprintf(text, sizeof text, "%d %ld", number, handled++);
    __atomic_fetch_add(&num_handled, 1, __ATOMIC_RELAXED);
}

static void *turn(void *value) {
    int tag = 10 + (int)(long)value, peer = world.rank ^ 1;
    uint64_t own = (uint64_t)tag, got = 0;
    for (int i = 0; i < NUM_TURNS; i++) {
        if (world.rank % 2 == 0) MUST(send_bytes(&own, 8, peer, tag) == 0), receive_bytes(&got, 8, peer, tag);
        else receive_bytes(&got, 8, peer, tag), MUST(send_bytes(&own, 8, peer, tag) == 0);
        own = own * 33 + got + (uint64_t)i;
    }
    return (void *)own;
}

/* Threads that come and go, all in MPI at once, while a timer interrupts them. */
static void threads(void) {
    struct itimerval often = {{0, 1000}, {0, 1000}};
    signal(SIGALRM, on_timer);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int round = 0; round < 3; round++) {
        pthread_t all[NUM_THREADS];
        for (long i = 0; i < NUM_THREADS; i++) MUST(pthread_create(&all[i], NULL, turn, (void *)i) == 0);
        for (int i = 0; i < NUM_THREADS; i++) {
            void *own;
            MUST(pthread_join(all[i], &own) == 0);
            sum = sum * 31 + (uint64_t)own;
        }
        int status;
        pid_t child = fork();
        if (child == 0) execlp("true", "true", NULL);
        MUST(child > 0);
        while (waitpid(child, &status, 0) < 0) continue;
        MUST(status == 0);
    }
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
}

/* What there is of the process: threads, descriptors, lines of its map. */
static void look(int found[3]) {
    static const char *const folders[] = {"/proc/self/task", "/proc/self/fd"};
    for (int i = 0; i < 2; i++) {
        DIR *folder = opendir(folders[i]);
        found[i] = 0;
        while (readdir(folder)) found[i]++;
        closedir(folder);
    }
    FILE *maps = fopen("/proc/self/maps", "r");
    found[2] = 0;
    unsigned long from;
    char line[512];
    while (fgets(line, sizeof line, maps)) {
        sscanf(line, "%lx", &from);
        found[2] += is_in_region(from);
    }
    fclose(maps);
}

int main(int count, char **arguments) {
    int before[3], after[3];
    sum = 7 + 1000 * strtoull(arguments[1], NULL, 10);
    if (getenv("AUDIT")) begin_audit();
    look(before);
    for (char **stay = arguments + 2; stay + 2 < arguments + count; stay += 3) {
        Seat seat;
        char path[256];
        const void *functions;
        snprintf(path, sizeof path, "%s/%s", stay[0], arguments[1]);
        MUST(take_seat(path, &seat));
        const char *error = load_lower(stay[1], stay[2], seat.variables, &functions);
        if (error) return fprintf(stderr, "%s\n", error), 1;
        if (seat.descriptor >= 0) give_descriptor(seat.descriptor);
        mpi = functions;
        MUST(CROSS("MPI_Init_thread", mpi->start(3, &world)) == 0);
        MUST(world.rank == atoi(arguments[1]));
        ring();
        long_messages();
        stepping_out();
        if (getenv("CRASH")) {
            if (world.rank == 1) CROSS("MPI_Send", mpi->send((void *)8, 100, 0, 9));
            else receive_bytes(&after, sizeof after, 1, 9);
        }
        if (world.thread_level == 3) threads();
        MUST(CROSS("MPI_Finalize", mpi->finish()) == 0);
        Belongings left = count_belongings();
        error = end_lower();
        if (error) return fprintf(stderr, "%s\n", error), 1;
        leave_seat(&seat, 0);
        look(after);
        if (after[0] != before[0] || after[1] != before[1] || after[2] != before[2])
            return fprintf(stderr, "%d threads, %d descriptors, %d maps are left\n", after[0] - before[0], after[1] - before[1], after[2]), 1;
        printf("%s: sum %lx; it had left %d threads, %d descriptors\n", world.library, sum, left.num_threads, left.num_descriptors);
        fflush(stdout);
    }
    if (num_handled == 0) return fprintf(stderr, "no signal came\n"), 1;
    return 0;
}
