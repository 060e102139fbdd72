/* What does a call of another process on the same core cost at least? Two switches: there and back, by sched_yield.

       switches REPEAT     prints "switches" and the seconds of one turn, the median of nine batches */

#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BATCHES = 9 };

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static int compare(const void *first, const void *second)
{
    double difference = *(const double *)first - *(const double *)second;
    return (difference > 0) - (difference < 0);
}

int main(int count, char **arguments)
{
    int repeat = count > 1 ? atoi(arguments[1]) : 10000;
    double found[BATCHES];
    _Atomic unsigned *asked = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    _Atomic unsigned *answered = asked + 64;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    pid_t other = fork();
    for (unsigned number = 1; other == 0; number++) {
        while (atomic_load(asked) != number)
            sched_yield();
        atomic_store(answered, number);
    }
    unsigned number = 0;
    for (int batch = 0; batch < BATCHES; batch++) {
        double start = now_s();
        for (int turn = 0; turn < repeat; turn++) {
            atomic_store(asked, ++number);
            while (atomic_load(answered) != number)
                sched_yield();
        }
        found[batch] = (now_s() - start) / repeat;
    }
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
    qsort(found, BATCHES, sizeof *found, compare);
    printf("switches %.12g\n", found[BATCHES / 2]);
    return 0;
}
