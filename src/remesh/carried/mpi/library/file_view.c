/* Which bytes of a file does a view show, and where do runs of its data lie?
 *
 * Data byte n is in tile n / size, at n % size of that tile's data; its stretch follows by bisection over the data that
 * come before each. From there on stretches are taken in order, and runs that touch in the file are joined.
 * Source: MPI 4.1, sections 14.1.1 and 14.3.
 */
#include <errno.h>
#include <unistd.h>

#include "file.h"

/* ---- making one ---- */

typedef struct {
    View *view;
    int64_t last, end, room;
    bool falls, overlaps;
} Making;

static void add_stretch(void *state, Segment run) {
    Making *making = state;
    View *view = making->view;
    making->falls = making->falls || run.offset < making->last;
    making->overlaps = making->overlaps || run.offset < making->end;
    making->last = run.offset;
    if (run.offset + run.num_bytes > making->end) making->end = run.offset + run.num_bytes;
    if (view->num_stretches == making->room) {
        making->room = making->room ? 2 * making->room : 4;
        view->stretches = must_have(realloc(view->stretches, (size_t)making->room * sizeof *view->stretches));
    }
    view->stretches[view->num_stretches++] = (Stretch){run.offset, run.num_bytes, view->size};
    view->size += run.num_bytes;
}

int make_view(int64_t displacement, const Datatype *etype, const Datatype *filetype, bool is_read_only, View *view) {
    *view = (View){.displacement = displacement, .etype_bytes = etype->size, .extent = filetype->extent};
    Making making = {.view = view};
    visit_runs(filetype, 0, 1, add_stretch, &making);
    view->is_dense = view->num_stretches == 1 && view->stretches[0].offset == 0 && view->size == view->extent;
    int error = MPI_SUCCESS;
    if (displacement < 0)
        error = fail(MPI_ERR_ARG, "the displacement is %lld bytes, expected none or more", (long long)displacement);
    else if (etype->size <= 0)
        error = fail(MPI_ERR_ARG, "the etype has no data; choose one with at least one byte");
    else if (view->size % etype->size)
        error = fail(MPI_ERR_ARG, "the filetype has %lld bytes, no multiple of the etype's %lld", (long long)view->size,
                     (long long)etype->size);
    else if (making.falls)
        error = fail(MPI_ERR_ARG, "the filetype's displacements are negative or fall; expected them to ascend");
    else if (making.overlaps && !is_read_only)
        error = fail(MPI_ERR_ARG, "the filetype's parts lie over each other; this is for files that are open for reading");
    else if (view->size && view->extent <= 0)
        error = fail(MPI_ERR_ARG, "the filetype's extent is %lld bytes, expected more than 0", (long long)view->extent);
    if (error) drop_view(view);
    return error;
}

void drop_view(View *view) {
    free(view->stretches);
    *view = (View){0};
}

/* ---- walking over it ---- */

typedef struct {
    const View *view;
    int64_t base, skipped, left; /* where the tile begins; data of the stretch that are passed over; data to come */
    MPI_Count at;
} Walk;

/* The last stretch that begins at or before a byte of a tile's data. */
static MPI_Count find_stretch(const View *view, int64_t within) {
    MPI_Count low = 0, high = view->num_stretches;
    while (high - low > 1) {
        MPI_Count middle = low + (high - low) / 2;
        if (view->stretches[middle].before <= within) low = middle;
        else high = middle;
    }
    return low;
}

static Walk walk_from(const View *view, int64_t start, int64_t num_bytes) {
    if (view->is_dense || num_bytes == 0) return (Walk){view, view->displacement + start, 0, num_bytes, 0};
    int64_t within = start % view->size;
    MPI_Count at = find_stretch(view, within);
    int64_t base = view->displacement + start / view->size * view->extent;
    return (Walk){view, base, within - view->stretches[at].before, num_bytes, at};
}

/* Length of the next run, whose pieces touch in the file, and its position; 0 at the end. */
static int64_t next_run(Walk *walk, int64_t *position) {
    const View *view = walk->view;
    int64_t length = 0;
    if (view->is_dense) {
        *position = walk->base;
        length = walk->left;
        walk->left = 0;
    }
    while (walk->left) {
        const Stretch *stretch = &view->stretches[walk->at];
        int64_t piece = walk->base + stretch->offset + walk->skipped, piece_bytes = stretch->length - walk->skipped;
        if (length == 0) *position = piece;
        else if (piece != *position + length) break;
        if (piece_bytes > walk->left) piece_bytes = walk->left;
        length += piece_bytes;
        walk->left -= piece_bytes;
        walk->skipped = 0;
        if (++walk->at == view->num_stretches) {
            walk->at = 0;
            walk->base += view->extent;
        }
    }
    return length;
}

void find_span(const View *view, int64_t start, int64_t num_bytes, int64_t *first, int64_t *end) {
    Walk walk = walk_from(view, start, num_bytes);
    int64_t position, length;
    *first = INT64_MAX, *end = 0;
    /* Parts that lie over each other need not end in the order in which they begin. */
    while ((length = next_run(&walk, &position)) > 0) {
        if (position < *first) *first = position;
        if (position + length > *end) *end = position + length;
    }
}

int64_t byte_offset(const View *view, int64_t offset) {
    int64_t first = view->displacement, end;
    if (view->size) find_span(view, offset * view->etype_bytes, 1, &first, &end);
    return first;
}

int64_t etypes_before(const View *view, int64_t end) {
    int64_t reach = end - view->displacement, num_bytes = 0;
    for (MPI_Count i = 0; i < view->num_stretches; i++) {
        const Stretch *stretch = &view->stretches[i];
        int64_t past = reach - stretch->offset;
        /* Tiles of which the whole stretch lies before the end, and then those of which a part does. */
        int64_t num_whole = past < stretch->length ? 0 : (past - stretch->length) / view->extent + 1;
        num_bytes += num_whole * stretch->length;
        for (int64_t left = past - num_whole * view->extent; left > 0; left -= view->extent) num_bytes += left;
    }
    return (num_bytes + view->etype_bytes - 1) / view->etype_bytes;
}

/* ---- data ---- */

int move_data(const File *file, bool writes, int64_t start, char *memory, int64_t num_bytes, int64_t *done) {
    const View *view = &file->view;
    int64_t position = 0, length, end, tiles = view->size ? (start + num_bytes) / view->size + 1 : 0;
    *done = 0;
    if (__builtin_mul_overflow(tiles, view->extent, &end) || end > INT64_MAX - view->displacement) return EOVERFLOW;
    Walk walk = walk_from(view, start, num_bytes);
    while ((length = next_run(&walk, &position)) != 0) {
        while (length) {
            ssize_t moved = writes ? pwrite(file->descriptor, memory + *done, (size_t)length, (off_t)position)
                                   : pread(file->descriptor, memory + *done, (size_t)length, (off_t)position);
            if (moved < 0 && errno == EINTR) continue;
            if (moved < 0) return errno;
            if (moved == 0) return writes ? EIO : 0;
            *done += moved;
            position += moved;
            length -= moved;
        }
    }
    return 0;
}
