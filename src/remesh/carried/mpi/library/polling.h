/* How long does a "no" of the lower half hold? For programs that compute, and ask in between.
 *
 * Natively MPI_Test and MPI_Iprobe take 30 ns, so programs call them wherever they pass by. Here each is a call of the lower
 * half, which takes a hundred times as long. So a "no" holds for some times as long as it took to get: who asks for one thing
 * again and again spends no more than a fifth of the time on that, and hears of it so much later, 20 us at the most. It holds no
 * longer
 *
 * - once the program has called the lower half for anything else: what it has learned there may be why it asks;
 * - for a program that only asks: it has nothing else to do, and hears at once.
 */
#ifndef REMESH_POLLING_H
#define REMESH_POLLING_H

#include "channel.h"

/* What is known of a probe that found nothing; of each thread some. */
typedef struct {
    uint64_t comm;
    int source, tag;
    NotYet not_yet;
} AskedProbe;

/* A thread is about to ask: the time in ns, for the others. */
INTERNAL int64_t begin_poll(void);
/* Whether all of these, which are under way, are known to be so; NULL and those that are over are left out. */
INTERNAL bool are_known_open(Operation *const *operations, int64_t count, int64_t now_ns);
/* They have been asked for since `asked_ns`: those that are under way are known to be so. */
INTERNAL void note_open(Operation *const *operations, int64_t count, int64_t asked_ns);
/* Where this thread keeps what it knows of such a probe. */
INTERNAL AskedProbe *find_probe(uint64_t comm, int source, int tag);
INTERNAL bool is_known_absent(const AskedProbe *probe, int64_t now_ns);
INTERNAL void note_absent(AskedProbe *probe, int64_t asked_ns);

#endif
