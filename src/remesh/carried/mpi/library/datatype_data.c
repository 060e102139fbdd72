/* The data of buffers: into one run of bytes, out of it, and where they lie. */
#include "datatype.h"

#include "layout.h"

/* All elements of a buffer as one part. */
static Part whole(const Datatype *type, MPI_Count count) {
    return (Part){.stride = type->extent, .count = count, .layout = type->layout};
}

/* ---- Packing ---- */

typedef struct {
    char *packed, *memory;
    int64_t left; /* bytes that are to be unpacked yet */
} Copying;

/* A constant size lets the compiler copy without a call. */
#define COPY_ROWS(to, to_stride, from, from_stride, num_bytes, count)                                             \
    for (MPI_Count i_ = 0; i_ < (count); i_++) memcpy((to) + i_ * (to_stride), (from) + i_ * (from_stride), num_bytes)
#define COPY_SIZES(to, to_stride, from, from_stride, num_bytes, count)                                            \
    switch (num_bytes) {                                                                                          \
    case 4: COPY_ROWS(to, to_stride, from, from_stride, 4, count); break;                                         \
    case 8: COPY_ROWS(to, to_stride, from, from_stride, 8, count); break;                                         \
    case 16: COPY_ROWS(to, to_stride, from, from_stride, 16, count); break;                                       \
    default: COPY_ROWS(to, to_stride, from, from_stride, (size_t)(num_bytes), count);                             \
    }

static bool pack_row(void *state, Row row) {
    Copying *copying = state;
    const char *from = copying->memory + row.offset;
    COPY_SIZES(copying->packed, row.num_bytes, from, row.stride, row.num_bytes, row.count)
    copying->packed += row.num_bytes * row.count;
    return true;
}

void pack_elements(const void *from, MPI_Count count, const Datatype *type, void *to) {
    if (type->is_dense) {
        if (count > 0 && type->size > 0) memcpy(to, from, (size_t)data_bytes(type, count));
        return;
    }
    Copying copying = {.packed = to, .memory = (char *)(uintptr_t)from};
    Part part = whole(type, count);
    visit_rows(&part, 0, pack_row, &copying);
}

static bool unpack_row(void *state, Row row) {
    Copying *copying = state;
    MPI_Count fitting = copying->left / row.num_bytes;
    MPI_Count count = fitting < row.count ? fitting : row.count;
    char *to = copying->memory + row.offset;
    COPY_SIZES(to, row.stride, copying->packed, row.num_bytes, row.num_bytes, count)
    copying->packed += count * row.num_bytes;
    copying->left -= count * row.num_bytes;
    if (count == row.count) return copying->left > 0;
    memcpy(to + count * row.stride, copying->packed, (size_t)copying->left);
    copying->left = 0;
    return false;
}

void unpack_elements(const void *from, int64_t num_bytes, void *to, MPI_Count count, const Datatype *type) {
    int64_t room = data_bytes(type, count);
    if (num_bytes > room) num_bytes = room;
    if (num_bytes <= 0) return;
    if (type->is_dense) {
        memcpy(to, from, (size_t)num_bytes);
        return;
    }
    Copying copying = {.packed = (char *)(uintptr_t)from, .memory = to, .left = num_bytes};
    Part part = whole(type, count);
    visit_rows(&part, 0, unpack_row, &copying);
}

/* ---- Runs ---- */

/* The run that has been found so far: the next one may go on with it. */
typedef struct {
    Segment run;
    void (*each)(void *state, Segment run);
    void *state;
} Joining;

static bool join_row(void *state, Row row) {
    Joining *joining = state;
    for (MPI_Count i = 0; i < row.count; i++) {
        MPI_Aint offset = row.offset + i * row.stride;
        if (joining->run.num_bytes && joining->run.offset + joining->run.num_bytes == offset) {
            joining->run.num_bytes += row.num_bytes;
            continue;
        }
        if (joining->run.num_bytes) joining->each(joining->state, joining->run);
        joining->run = (Segment){offset, row.num_bytes};
    }
    return true;
}

void visit_runs(
    const Datatype *type, MPI_Aint base, MPI_Count count, void (*each)(void *state, Segment run), void *state) {
    Joining joining = {.each = each, .state = state};
    Part part = whole(type, count);
    visit_rows(&part, base, join_row, &joining);
    if (joining.run.num_bytes) each(state, joining.run);
}

/* ---- Payloads and landings ---- */

/* Whether so many elements are one run of bytes in order; then it begins `true_lb` behind the buffer. */
static bool is_one_run(const Datatype *type, MPI_Count count) {
    return type->is_dense || (count == 1 && type->layout->is_run);
}

Payload payload_of(const void *buffer, MPI_Count count, const Datatype *type) {
    Payload payload = {.at = buffer, .num_bytes = data_bytes(type, count)};
    if (payload.num_bytes == 0) return payload;
    if (is_one_run(type, count)) {
        payload.at = (const char *)buffer + type->true_lb;
        return payload;
    }
    payload.at = payload.owned = must_have(malloc((size_t)payload.num_bytes));
    pack_elements(buffer, count, type, payload.owned);
    return payload;
}

Landing landing_for(void *buffer, MPI_Count count, Datatype *type) {
    Landing landing = {.buffer = buffer, .count = count, .type = type, .at = buffer, .room = data_bytes(type, count)};
    keep(type);
    if (landing.room == 0) return landing;
    if (is_one_run(type, count)) landing.at = (char *)buffer + type->true_lb;
    else landing.at = landing.owned = must_have(malloc((size_t)landing.room));
    return landing;
}

void land(Landing *landing, int64_t num_bytes) {
    if (landing->owned) unpack_elements(landing->owned, num_bytes, landing->buffer, landing->count, landing->type);
    drop_landing(landing);
}

void drop_landing(Landing *landing) {
    free(landing->owned);
    let_go(landing->type);
    *landing = (Landing){0};
}
