/* Answers to MPI_Test and MPI_Iprobe that need no call of the lower half; polling.h says when. */
#include "polling.h"

#include <time.h>

enum { HOLDS = 4, LONGEST_NS = 20000 };
/* Who asks more often than this, on an average of NUM_POLLS times, does nothing else. */
enum { LEAST_WORK_NS = 200, NUM_POLLS = 16 };
enum { NUM_PROBES = 8 };

/* Of this thread. Times are those that it had for itself: the calls of the lower half for polls are left out. */
static _Thread_local int64_t called_ns, marked_ns; /* what such calls took; when these polls began */
static _Thread_local int num_polls;
static _Thread_local bool computes;
static _Thread_local AskedProbe probes[NUM_PROBES];

static int64_t own_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec - called_ns;
}

int64_t begin_poll(void) {
    int64_t now = own_ns();
    if (++num_polls == NUM_POLLS) {
        computes = marked_ns && now - marked_ns > NUM_POLLS * LEAST_WORK_NS;
        marked_ns = now;
        num_polls = 0;
    }
    return now;
}

/* After a restart the clock may be behind, as that of another host. */
static bool holds(const NotYet *told, int64_t now) {
    return computes && told->until_ns && told->calls == calls_made() && told->from_ns <= now && now < told->until_ns;
}

static NotYet not_yet(int64_t asked_ns) {
    int64_t call_ns = own_ns() - asked_ns, held_ns = HOLDS * call_ns;
    called_ns += call_ns;
    return (NotYet){calls_made(), asked_ns, asked_ns + (held_ns < LONGEST_NS ? held_ns : LONGEST_NS)};
}

bool are_known_open(Operation *const *operations, int64_t count, int64_t now_ns) {
    for (int64_t i = 0; i < count; i++)
        if (operations[i] && operations[i]->number && !holds(&operations[i]->not_yet, now_ns)) return false;
    return true;
}

void note_open(Operation *const *operations, int64_t count, int64_t asked_ns) {
    NotYet told = not_yet(asked_ns);
    for (int64_t i = 0; i < count; i++)
        if (operations[i] && operations[i]->number) operations[i]->not_yet = told;
}

AskedProbe *find_probe(uint64_t comm, int source, int tag) {
    AskedProbe *probe = &probes[(comm + (uint64_t)(unsigned)source * 3 + (uint64_t)(unsigned)tag * 5) % NUM_PROBES];
    if (probe->comm != comm || probe->source != source || probe->tag != tag) *probe = (AskedProbe){comm, source, tag, {0}};
    return probe;
}

bool is_known_absent(const AskedProbe *probe, int64_t now_ns) { return holds(&probe->not_yet, now_ns); }

void note_absent(AskedProbe *probe, int64_t asked_ns) { probe->not_yet = not_yet(asked_ns); }
