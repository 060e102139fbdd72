/* A thread's place in the channel: how it posts a request and waits for the reply. channel.py has the layout. */
#ifndef REMESH_SLOTS_H
#define REMESH_SLOTS_H

#include "core.h"
#include "../_calls.h"

/* Most bytes of a payload that is posted in a ring. */
#define POST_BYTES 4096

/* Opens the channel; false if this process was not started by Remesh. */
INTERNAL bool open_channel(void);
/* Where its file is. */
INTERNAL const char *channel_path(void);
/* A thread takes a slot for its next call, and gives it back with the reply read. Few threads share one: then
 * `is_shared` is set, and no call may be made that waits for another rank.
 */
typedef struct {
    char *slot;
    bool is_shared;
} Lease;
INTERNAL Lease take_slot(const char *doing);
/* The same to ask what has become of something; only if the program learns something new it counts as a call. */
INTERNAL Lease take_slot_to_ask(const char *doing);
INTERNAL void note_news(void);
INTERNAL void give_slot(Lease lease);
/* Posts the request in the slot's body and waits for its reply, which is returned. */
INTERNAL char *call_lower(char *slot);
/* Room for an entry in the slot's ring of calls that nobody answers; NULL if it is full. `publish` hands it over. */
INTERNAL char *begin_entry(char *slot, size_t num_bytes, uint32_t *end);
INTERNAL void publish(char *slot, uint32_t end, bool wake);
/* The word of the gate; see channel.py. */
INTERNAL _Atomic uint32_t *gate_word(void);

#endif
