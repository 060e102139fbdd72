/* The file pointer that the ranks of a file share: a number in the memory of the first rank, moved by one-sided access.
 *
 * Only the first rank offers memory, so only its lower half listens for accesses. A rank that has the file to itself keeps
 * the number without any window. Source: MPI 4.1, section 14.4.4.
 */
#include "channel.h"
#include "exchange.h"
#include "file.h"

/* The file's own communicator has a window of the same number. */
static bool has_memory(const File *file) { return file->comm->size > 1 && file->comm->rank == 0; }

int make_shared_pointer(File *file) {
    if (!has_memory(file)) return MPI_SUCCESS;
    TRY(lower_make_window(file->comm->number, &file->shared));
    return lower_attach_memory(file->comm->number, &file->shared, sizeof file->shared);
}

int free_shared_pointer(File *file) { return has_memory(file) ? lower_free_window(file->comm->number) : MPI_SUCCESS; }

/* Change the number at once with respect to all ranks; what it was before. */
static int apply(File *file, int op, int64_t operand, int64_t *before) {
    *before = file->shared;
    if (file->comm->size == 1) {
        if (op == OP_SUM) file->shared += operand;
        if (op == OP_REPLACE) file->shared = operand;
        return MPI_SUCCESS;
    }
    Run whole = {0, sizeof operand};
    Access access = {.op = op, .type = real_type(datatype_of(MPI_INT64_T)), .unit = sizeof operand,
                     .target = file->comm->world[0], .fetches = true, .data = &operand, .data_bytes = sizeof operand,
                     .runs = &whole, .num_runs = 1};
    Operation operation = {.at = before, .room = sizeof *before}, *const only[] = {&operation};
    if (op == OP_NO_OP) access.data_bytes = 0;
    TRY(lower_access(file->comm->number, &access, &operation));
    while (operation.number) TRY(lower_wait(FLAG_BLOCKING, MODE_ALL, only, 1));
    return operation.ended.error;
}

int get_shared(File *file, int64_t *position) { return apply(file, OP_NO_OP, 0, position); }

int set_shared(File *file, int64_t position) {
    int64_t before;
    /* No rank moves it before all have come, and none looks before it has been moved. */
    TRY(barrier(file->comm));
    return agree(file->comm, file->comm->rank == 0 ? apply(file, OP_REPLACE, position, &before) : MPI_SUCCESS);
}

int take_shared(File *file, int64_t num_etypes, int64_t *start) { return apply(file, OP_SUM, num_etypes, start); }

int take_in_turn(File *file, int64_t num_etypes, int64_t *start) {
    int rank = file->comm->rank, size = file->comm->size, error = MPI_SUCCESS;
    int64_t *everybody = NEW_ARRAY(int64_t, size), all = 0, first = 0, before_me = 0;
    error = gather_all(file->comm, &num_etypes, sizeof num_etypes, everybody);
    for (int i = 0; i < size; i++) all += everybody[i];
    for (int i = 0; i < rank; i++) before_me += everybody[i];
    free(everybody);
    if (!error) error = agree(file->comm, rank == 0 ? take_shared(file, all, &first) : MPI_SUCCESS);
    if (!error) error = broadcast(file->comm, 0, &first, sizeof first);
    *start = first + before_me;
    return error;
}
