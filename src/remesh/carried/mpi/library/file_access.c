/* The many names by which data get into files and out of them: one way.
 *
 * A name is made of what is done, where (at an offset, at this rank's pointer, at the shared one, there in order of
 * ranks), whether all ranks do it together, and its form: blocking, started, or split into a begin and an end. Every
 * access is carried out when it is asked for; requests are born complete. Collective ones end when all ranks have done
 * their part, and fail on all ranks or on none. Source: MPI 4.1, section 14.4.
 */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "channel.h"
#include "errors.h"
#include "exchange.h"
#include "file.h"
#include "request.h"

typedef enum { AT_OFFSET, AT_OWN, AT_SHARED, IN_TURN } Position;

typedef struct {
    const char *name; /* of the blocking form, without MPI_File_ */
    bool writes;
    Position where;
    bool is_collective;
    int64_t offset;
    void *buffer;
    MPI_Count count;
    Datatype *type;
} Transfer;

/* MPI_SUCCESS if the access is allowed, and how many etypes it is. */
static int prepare(const File *file, const Transfer *transfer, int64_t *num_etypes) {
    int64_t num_bytes = data_bytes(transfer->type, transfer->count);
    const View *view = &file->view;
    *num_etypes = num_bytes / view->etype_bytes;
    if (transfer->writes && file->amode & MPI_MODE_RDONLY)
        return fail(MPI_ERR_READ_ONLY, "%s: %s is open for reading; open it for writing", transfer->name, file->path);
    if (!transfer->writes && file->amode & MPI_MODE_WRONLY)
        return fail(MPI_ERR_ACCESS, "%s: %s is open for writing; open it for reading", transfer->name, file->path);
    if (transfer->where <= AT_OWN) TRY(expect_random_access(file, transfer->name));
    if (num_bytes % view->etype_bytes)
        return fail(MPI_ERR_ARG, "%s: %lld bytes, no multiple of the etype's %lld", transfer->name, (long long)num_bytes,
                    (long long)view->etype_bytes);
    if (num_bytes && !view->size)
        return fail(MPI_ERR_ARG, "%s: %lld bytes in a view whose filetype has none", transfer->name, (long long)num_bytes);
    if (transfer->where == AT_OFFSET && transfer->offset < 0)
        return fail(MPI_ERR_ARG, "%s: the offset is %lld, expected 0 or more", transfer->name, (long long)transfer->offset);
    return MPI_SUCCESS;
}

/* Where the access begins, etypes; a pointer moves behind it, however much there is to read. */
static int find_start(File *file, const Transfer *transfer, int64_t num_etypes, int64_t *start) {
    if (transfer->where == AT_SHARED) return take_shared(file, num_etypes, start);
    if (transfer->where == IN_TURN) return take_in_turn(file, num_etypes, start);
    *start = transfer->where == AT_OFFSET ? transfer->offset : file->position;
    if (transfer->where == AT_OWN) file->position += num_etypes;
    return MPI_SUCCESS;
}

/* Keep other processes that lock, too, out of a span of the file, or let them in: POSIX locks, which hold between hosts if
 * the file system knows them there. 0 or an errno.
 */
static int lock_span(const File *file, int64_t first, int64_t end, short type) {
    struct flock span = {.l_type = type, .l_whence = SEEK_SET, .l_start = first, .l_len = end - first};
    int failed;
    do failed = fcntl(file->descriptor, F_SETLKW, &span);
    while (failed && errno == EINTR);
    return failed ? errno : 0;
}

/* Moves bytes inside the gate; a lock, too, is inside: an image does not hold it. */
static int move_inside(File *file, bool writes, int64_t start, void *memory, int64_t num_bytes, int64_t *moved) {
    int64_t first, end;
    bool locks = file->is_atomic && num_bytes;
    int error = 0;
    if (locks) find_span(&file->view, start, num_bytes, &first, &end);
    enter_gate();
    if (locks) error = lock_span(file, first, end, writes ? F_WRLCK : F_RDLCK);
    if (!error) error = move_data(file, writes, start, memory, num_bytes, moved);
    if (locks) lock_span(file, first, end, F_UNLCK);
    leave_gate();
    return error;
}

/* All of an access; ranks that take turns agree beforehand. */
static int carry_out(File *file, const Transfer *transfer, int64_t *num_bytes) {
    int64_t num_etypes, start;
    int error = prepare(file, transfer, &num_etypes);
    *num_bytes = 0;
    if (transfer->where == IN_TURN) error = agree(file->comm, error);
    if (!error) error = find_start(file, transfer, num_etypes, &start);
    if (error) return error;
    if (__builtin_mul_overflow(start, file->view.etype_bytes, &start))
        return fail_of_system(transfer->name, file->path, EOVERFLOW);
    if (transfer->writes) {
        Payload data = payload_of(transfer->buffer, transfer->count, transfer->type);
        file->is_dirty = true;
        error = move_inside(file, true, start, (void *)(uintptr_t)data.at, data.num_bytes, num_bytes);
        free(data.owned);
    } else {
        Landing landing = landing_for(transfer->buffer, transfer->count, transfer->type);
        error = move_inside(file, false, start, landing.at, landing.room, num_bytes);
        land(&landing, *num_bytes);
    }
    return error ? fail_of_system(transfer->name, file->path, error) : MPI_SUCCESS;
}

/* ---- forms ---- */

static int do_now(File *file, const Transfer *transfer, MPI_Status *status) {
    int64_t num_bytes;
    int error = carry_out(file, transfer, &num_bytes);
    if (transfer->is_collective) error = agree(file->comm, error);
    if (!error) set_status(status, MPI_ANY_SOURCE, MPI_ANY_TAG, num_bytes, false);
    return error;
}

static int start(File *file, const Transfer *transfer, Request **request) {
    int64_t num_bytes;
    TRY(carry_out(file, transfer, &num_bytes));
    *request = make_request(NULL, 0);
    (*request)->is_finished = true;
    set_status(&(*request)->status, MPI_ANY_SOURCE, MPI_ANY_TAG, num_bytes, false);
    return MPI_SUCCESS;
}

static int begin(File *file, const Transfer *transfer) {
    Split *split = &file->split;
    if (split->name)
        return fail(MPI_ERR_IO, "%s_begin: %s_begin has had no end; end it first", transfer->name, split->name);
    *split = (Split){.name = transfer->name};
    split->error = carry_out(file, transfer, &split->num_bytes);
    /* What went wrong is said at the end, on all ranks. */
    if (split->error) snprintf(split->words, sizeof split->words, "%s", noted_words());
    return MPI_SUCCESS;
}

static int end(File *file, const char *name, MPI_Status *status) {
    Split *split = &file->split;
    if (split->name == NULL || strcmp(split->name, name))
        return fail(MPI_ERR_IO, "%s_end: %s is under way, expected %s_begin", name, split->name ? split->name : "nothing", name);
    split->name = NULL;
    TRY(agree(file->comm, split->error ? fail(split->error, "%s", split->words) : MPI_SUCCESS));
    set_status(status, MPI_ANY_SOURCE, MPI_ANY_TAG, split->num_bytes, false);
    return MPI_SUCCESS;
}

/* Parameters of a function: those of all, with an offset in front where there is one, and what is read must not be const. */
#define READ_PARAMETERS void *buf, MPI_Count count, Datatype *type
#define WRITE_PARAMETERS const void *buf, MPI_Count count, Datatype *type
#define ROW(called, does_write, place, collective, at)                                                    \
    &(const Transfer) {                                                                                   \
        .name = called, .writes = does_write, .where = place, .is_collective = collective, .offset = at,  \
        .buffer = (void *)(uintptr_t)buf, .count = count, .type = type                                    \
    }
#define BLOCKING(name, writes, place, collective, at, ...)                                                \
    int do_File_##name(__VA_ARGS__, MPI_Status *status) {                                                 \
        return do_now(fh, ROW(#name, writes, place, collective, at), status);                             \
    }
#define STARTED(name, writes, place, collective, at, ...)                                                 \
    int do_File_i##name(__VA_ARGS__, Request **request) {                                                 \
        return start(fh, ROW(#name, writes, place, collective, at), request);                             \
    }
#define SPLIT(name, writes, place, at, END, ...)                                                          \
    int do_File_##name##_begin(__VA_ARGS__) { return begin(fh, ROW(#name, writes, place, true, at)); }    \
    int do_File_##name##_end(File *fh, END, MPI_Status *status) {                                         \
        (void)buf;                                                                                        \
        return end(fh, #name, status);                                                                    \
    }
#define ACCESSES(verb, writes, PARAMETERS, END)                                                           \
    BLOCKING(verb##_at, writes, AT_OFFSET, false, offset, File *fh, MPI_Offset offset, PARAMETERS)        \
    BLOCKING(verb##_at_all, writes, AT_OFFSET, true, offset, File *fh, MPI_Offset offset, PARAMETERS)     \
    BLOCKING(verb, writes, AT_OWN, false, 0, File *fh, PARAMETERS)                                        \
    BLOCKING(verb##_all, writes, AT_OWN, true, 0, File *fh, PARAMETERS)                                   \
    BLOCKING(verb##_shared, writes, AT_SHARED, false, 0, File *fh, PARAMETERS)                            \
    BLOCKING(verb##_ordered, writes, IN_TURN, true, 0, File *fh, PARAMETERS)                              \
    STARTED(verb##_at, writes, AT_OFFSET, false, offset, File *fh, MPI_Offset offset, PARAMETERS)         \
    STARTED(verb##_at_all, writes, AT_OFFSET, true, offset, File *fh, MPI_Offset offset, PARAMETERS)      \
    STARTED(verb, writes, AT_OWN, false, 0, File *fh, PARAMETERS)                                         \
    STARTED(verb##_all, writes, AT_OWN, true, 0, File *fh, PARAMETERS)                                    \
    STARTED(verb##_shared, writes, AT_SHARED, false, 0, File *fh, PARAMETERS)                             \
    SPLIT(verb##_at_all, writes, AT_OFFSET, offset, END, File *fh, MPI_Offset offset, PARAMETERS)         \
    SPLIT(verb##_all, writes, AT_OWN, 0, END, File *fh, PARAMETERS)                                       \
    SPLIT(verb##_ordered, writes, IN_TURN, 0, END, File *fh, PARAMETERS)

/* do_File_read_at */ /* do_File_read_at_all */ /* do_File_read */ /* do_File_read_all */ /* do_File_read_shared */
/* do_File_read_ordered */ /* do_File_iread_at */ /* do_File_iread_at_all */ /* do_File_iread */ /* do_File_iread_all */
/* do_File_iread_shared */ /* do_File_read_at_all_begin */ /* do_File_read_at_all_end */ /* do_File_read_all_begin */
/* do_File_read_all_end */ /* do_File_read_ordered_begin */ /* do_File_read_ordered_end */
ACCESSES(read, false, READ_PARAMETERS, void *buf)
/* do_File_write_at */ /* do_File_write_at_all */ /* do_File_write */ /* do_File_write_all */ /* do_File_write_shared */
/* do_File_write_ordered */ /* do_File_iwrite_at */ /* do_File_iwrite_at_all */ /* do_File_iwrite */
/* do_File_iwrite_all */ /* do_File_iwrite_shared */ /* do_File_write_at_all_begin */ /* do_File_write_at_all_end */
/* do_File_write_all_begin */ /* do_File_write_all_end */ /* do_File_write_ordered_begin */
/* do_File_write_ordered_end */
ACCESSES(write, true, WRITE_PARAMETERS, const void *buf)
