/* In place of the channel: a process that is all of its job. What needs no other rank works; the rest is refused. */
#include "channel.h"

#define REFUSED(name, ...) \
    int name(__VA_ARGS__) { return fail(MPI_ERR_OTHER, #name ": this process has no lower half"); }

uint64_t calls_made(void) { return 0; }
bool channel_is_there(void) { return true; }
bool channel_is_open(void) { return true; }

int lower_hello(int *rank, int *size) {
    *rank = 0;
    *size = 1;
    return MPI_SUCCESS;
}

int lower_describe(const char *key, char *text, int room) {
    (void)key;
    if (room > 0) *text = 0;
    return MPI_SUCCESS;
}

int lower_finish(void) { return MPI_SUCCESS; }
int lower_abort(int code) { exit(code); }
int lower_make_communicator(uint64_t comm, int count, const int *world_ranks) {
    (void)comm, (void)count, (void)world_ranks;
    return MPI_SUCCESS;
}
int lower_free_communicator(uint64_t comm) {
    (void)comm;
    return MPI_SUCCESS;
}
const char *channel_path(void) { return "/no/channel"; }
void enter_gate(void) {}
void leave_gate(void) {}

#pragma GCC diagnostic ignored "-Wunused-parameter"
REFUSED(lower_send, int flags, uint64_t comm, int dest, int tag, const void *data, int64_t num_bytes, Operation *operation)
REFUSED(lower_receive, int flags, uint64_t comm, int source, int tag, Operation *operation)
REFUSED(lower_probe, int flags, uint64_t comm, int source, int tag, Probed *probed)
REFUSED(lower_receive_message, int flags, uint64_t message, Operation *operation)
REFUSED(lower_wait, int flags, int mode, Operation *const *operations, int64_t count)
REFUSED(lower_cancel, uint64_t number)
REFUSED(lower_free, uint64_t number)
REFUSED(lower_collective, int flags, uint64_t comm, const Collective *collective, Operation *operation)
REFUSED(lower_make_window, uint64_t window, const void *base)
REFUSED(lower_free_window, uint64_t window)
REFUSED(lower_attach_memory, uint64_t window, const void *address, int64_t num_bytes)
REFUSED(lower_detach_memory, uint64_t window, const void *address)
REFUSED(lower_access, uint64_t window, const Access *access, Operation *operation)
REFUSED(lower_lock, int flags, uint64_t window, int target, bool exclusive, Operation *operation)
REFUSED(lower_unlock, uint64_t window, int target)
