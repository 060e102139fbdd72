/* The real MPI, as the lower half offers it: one source for all faces, compiled against our own headers of them. */
#include <string.h>

#include "lower_half.h"
#include "mpi.h"
#include "mpi_calls.h"

enum { ALL_OF_A_CALL = 1 << 30 }; /* bytes that fit an int; more is sent as so many of the larger type below */

/* A request or message of MPI in a number that is never 0: handles are integers or pointers, and may be 0. */
_Static_assert(sizeof(MPI_Request) <= 8 && sizeof(MPI_Message) <= 8, "handles fit a number");
static uint64_t number_of(const void *handle, size_t size) {
    uint64_t number = 0;
    memcpy(&number, handle, size);
    return number + 1;
}
static void handle_of(uint64_t number, void *handle, size_t size) {
    number -= 1;
    memcpy(handle, &number, size);
}

static int class_of(int error) {
    int found = MPI_ERR_OTHER;
    if (error == MPI_SUCCESS) return 0;
    MPI_Error_class(error, &found);
    return found == MPI_SUCCESS ? MPI_ERR_OTHER : found;
}

/* Bytes by a count and a type: more than an int counts are sent as one block of a type that is made for them. */
typedef struct {
    int count;
    MPI_Datatype type;
} Bytes;
static int begin_bytes(int64_t num_bytes, Bytes *bytes) {
    *bytes = (Bytes){(int)num_bytes, MPI_BYTE};
    if (num_bytes <= ALL_OF_A_CALL) return MPI_SUCCESS;
    int blocks = (int)(num_bytes / ALL_OF_A_CALL), rest = (int)(num_bytes % ALL_OF_A_CALL);
    MPI_Datatype block, types[2];
    int error = MPI_Type_contiguous(ALL_OF_A_CALL, MPI_BYTE, &block);
    if (error) return error;
    types[0] = block, types[1] = MPI_BYTE;
    int lengths[2] = {blocks, rest};
    MPI_Aint places[2] = {0, (MPI_Aint)blocks * ALL_OF_A_CALL};
    error = MPI_Type_create_struct(2, lengths, places, types, &bytes->type);
    MPI_Type_free(&block);
    if (error) return error;
    bytes->count = 1;
    return MPI_Type_commit(&bytes->type);
}
static int end_bytes(int64_t num_bytes, Bytes *bytes, int error) {
    if (num_bytes > ALL_OF_A_CALL) MPI_Type_free(&bytes->type);
    return class_of(error);
}

static int source_of(int source) { return source == ANY_RANK ? MPI_ANY_SOURCE : source; }
static int tag_of(int tag) { return tag == ANY_LABEL ? MPI_ANY_TAG : tag; }

static void tell(const MPI_Status *status, Arrival *arrival) {
    MPI_Count num_bytes = 0;
    int is_cancelled = 0;
    MPI_Get_elements_x((MPI_Status *)status, MPI_BYTE, &num_bytes);
    MPI_Test_cancelled((MPI_Status *)status, &is_cancelled);
    *arrival = (Arrival){status->MPI_SOURCE, status->MPI_TAG, num_bytes, true, is_cancelled};
}

static int start(int asked, World *world) {
    int wanted = asked == 3 ? MPI_THREAD_MULTIPLE : MPI_THREAD_SERIALIZED;
    int length = 0, error = MPI_Init_thread(NULL, NULL, wanted, &world->thread_level);
    if (error) return class_of(error);
    world->thread_level = world->thread_level == MPI_THREAD_MULTIPLE     ? 3
                          : world->thread_level == MPI_THREAD_SERIALIZED ? 2
                          : world->thread_level == MPI_THREAD_FUNNELED   ? 1
                                                                         : 0;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &world->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world->size);
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Get_library_version(library, &length);
    size_t end = strcspn(library, "\n");
    if (end >= sizeof world->library) end = sizeof world->library - 1;
    memcpy(world->library, library, end);
    world->library[end] = 0;
    return 0;
}

static int finish(void) { return class_of(MPI_Finalize()); }
static int end_job(int code) { return class_of(MPI_Abort(MPI_COMM_WORLD, code)); }

static int send(const void *data, int64_t num_bytes, int dest, int tag) {
    Bytes bytes;
    int error = begin_bytes(num_bytes, &bytes);
    if (!error) error = MPI_Send(data, bytes.count, bytes.type, dest, tag, MPI_COMM_WORLD);
    return end_bytes(num_bytes, &bytes, error);
}

static int receive(void *at, int64_t room, int source, int tag, Arrival *arrival) {
    Bytes bytes;
    MPI_Status status;
    int error = begin_bytes(room, &bytes);
    if (!error) error = MPI_Recv(at, bytes.count, bytes.type, source_of(source), tag_of(tag), MPI_COMM_WORLD, &status);
    if (arrival && !error) tell(&status, arrival);
    return end_bytes(room, &bytes, error);
}

static int start_send(const void *data, int64_t num_bytes, int dest, int tag, bool is_synchronous, uint64_t *request) {
    Bytes bytes;
    MPI_Request handle;
    int error = begin_bytes(num_bytes, &bytes);
    if (!error && is_synchronous) error = MPI_Issend(data, bytes.count, bytes.type, dest, tag, MPI_COMM_WORLD, &handle);
    else if (!error) error = MPI_Isend(data, bytes.count, bytes.type, dest, tag, MPI_COMM_WORLD, &handle);
    if (!error) *request = number_of(&handle, sizeof handle);
    return end_bytes(num_bytes, &bytes, error);
}

static int start_receive(void *at, int64_t room, int source, int tag, uint64_t *request) {
    Bytes bytes;
    MPI_Request handle;
    int error = begin_bytes(room, &bytes);
    if (!error) error = MPI_Irecv(at, bytes.count, bytes.type, source_of(source), tag_of(tag), MPI_COMM_WORLD, &handle);
    if (!error) *request = number_of(&handle, sizeof handle);
    return end_bytes(room, &bytes, error);
}

static int test(uint64_t *request, Arrival *arrival) {
    MPI_Request handle;
    MPI_Status status;
    int is_over = 0;
    handle_of(*request, &handle, sizeof handle);
    int error = MPI_Test(&handle, &is_over, &status);
    arrival->is_there = false;
    if (error || !is_over) return class_of(error);
    *request = 0;
    tell(&status, arrival);
    return 0;
}

static int wait_or_leave(uint64_t *request, const _Atomic uint32_t *leave, Arrival *arrival) {
    int error;
    do error = test(request, arrival);
    while (!error && *request && !atomic_load_explicit(leave, memory_order_relaxed));
    return error;
}

static int cancel(uint64_t request) {
    MPI_Request handle;
    handle_of(request, &handle, sizeof handle);
    return class_of(MPI_Cancel(&handle));
}

static int probe(int source, int tag, Arrival *arrival, uint64_t *message) {
    MPI_Message handle;
    MPI_Status status;
    int is_there = 0;
    int error = message ? MPI_Improbe(source_of(source), tag_of(tag), MPI_COMM_WORLD, &is_there, &handle, &status)
                        : MPI_Iprobe(source_of(source), tag_of(tag), MPI_COMM_WORLD, &is_there, &status);
    arrival->is_there = false;
    if (error || !is_there) return class_of(error);
    if (message) *message = number_of(&handle, sizeof handle);
    tell(&status, arrival);
    return 0;
}

static int receive_probed(void *at, int64_t room, uint64_t *message, Arrival *arrival) {
    Bytes bytes;
    MPI_Message handle;
    MPI_Status status;
    handle_of(*message, &handle, sizeof handle);
    int error = begin_bytes(room, &bytes);
    if (!error) error = MPI_Mrecv(at, bytes.count, bytes.type, &handle, &status);
    if (!error) *message = 0;
    if (!error) tell(&status, arrival);
    return end_bytes(room, &bytes, error);
}

static int barrier(void) { return class_of(MPI_Barrier(MPI_COMM_WORLD)); }
static int sum_doubles(const double *from, double *to, int count) {
    return class_of(MPI_Allreduce(from, to, count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD));
}

const void *lower_functions(void) {
    static const MpiCalls calls = {start,         finish, end_job,       send,   receive, start_send,     start_receive,
                                   test,          wait_or_leave, cancel, probe,  receive_probed, barrier, sum_doubles};
    return &calls;
}
