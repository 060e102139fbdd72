/* What polling.c knows of what is under way, on a clock and a lower half of this file: prints `answer` if all is right. */
#include <time.h>

static int read_clock(clockid_t clock, struct timespec *time);
#define clock_gettime read_clock
#include "polling.c"

static int64_t time_ns = 1000000000;
static uint64_t num_calls;
static int num_checked;

static int read_clock(clockid_t clock, struct timespec *time) {
    (void)clock;
    *time = (struct timespec){time_ns / 1000000000, time_ns % 1000000000};
    return 0;
}

uint64_t calls_made(void) { return num_calls; }

static void check(bool is_so, const char *what) {
    num_checked++;
    if (is_so) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

enum { CALL_NS = 3000, WORK_NS = 1000, POLL = 20 };

/* A poll as request.c makes it: whether the lower half was called. */
static bool test(Operation *const *operations, int count) {
    time_ns += POLL;
    int64_t asked_ns = begin_poll();
    if (are_known_open(operations, count, asked_ns)) return false;
    time_ns += CALL_NS;
    note_open(operations, count, asked_ns);
    return true;
}

static bool probe(uint64_t comm, int source, int tag) {
    time_ns += POLL;
    int64_t asked_ns = begin_poll();
    AskedProbe *asked = find_probe(comm, source, tag);
    if (is_known_absent(asked, asked_ns)) return false;
    time_ns += CALL_NS;
    note_absent(asked, asked_ns);
    return true;
}

int main(void) {
    Operation one = {.number = 1}, two = {.number = 2}, over = {.number = 0};
    Operation *const first[] = {&one}, *const second[] = {&two}, *const all[] = {&one, NULL, &over, &two};

    for (int i = 0; i < 50; i++) check(test(first, 1), "a program that only asks is told at once");

    int calls = 0;
    for (int i = 0; i < 1000; i++) {
        time_ns += WORK_NS;
        calls += test(first, 1) + test(second, 1) + probe(7, ANY, 3) + probe(7, 1, 4);
    }
    check(calls > 200 && calls < 500, "one that computes calls now and then, whatever it asks for");

    time_ns += WORK_NS;
    while (test(first, 1)) time_ns += WORK_NS;
    time_ns += WORK_NS;
    check(!test(first, 1), "a no holds");
    num_calls++;
    check(test(first, 1), "it holds no longer after another call");

    time_ns += WORK_NS;
    check(!test(first, 1), "a no holds again");
    Operation fresh = {.number = 3}, *const with_fresh[] = {&one, &fresh};
    check(test(with_fresh, 2), "one that has not been asked for is asked for");
    while (test(all, 4)) time_ns += WORK_NS;
    check(!test(all, 4), "those that are over, and none, are left out");

    time_ns += 1000000;
    check(test(first, 1), "a no is over in time");
    time_ns += WORK_NS;
    check(!test(first, 1), "a no holds a third time");
    time_ns = 5000;
    check(test(first, 1), "the clock of another host is behind");
    for (int i = 0; i < 50; i++) time_ns += 3 * WORK_NS, test(first, 1);
    while (test(first, 1)) time_ns += WORK_NS;
    check(!test(first, 1), "a no holds there, too");
    for (int i = 0; i < 50; i++) test(first, 1);
    check(test(first, 1), "it ends for a program that only asks from now on");

    check(probe(8, ANY, 3) && probe(9, ANY, 3), "probes of different communicators are different");
    printf("answer %d\n", num_checked);
    return 0;
}
