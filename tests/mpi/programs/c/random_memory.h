/* Steps of windows and of files, whose accesses chance has chosen: kinds, datatypes on both sides, epochs, views. */
#pragma once
#include "random_groups.h"

/* ---- Windows: each access has an area of its own in the memory of one target ---- */

typedef enum { W_ALLOCATED, W_CREATED, W_SHARED, W_DYNAMIC } Kind;
typedef enum { E_FENCES, E_PARTNERS, E_SHARED_LOCK, E_LOCK, E_UNCHECKED, E_ALL } Span;
enum { AREA = 65536, AREAS = 4 };

/* A window of all ranks, with what an address in it is at the target. */
typedef struct {
    MPI_Win win;
    char *memory, *created;
    Kind kind;
    MPI_Aint start;
    int unit, to, from;
} Reach;

static char at_first(int of_rank, int64_t i) { return (char)mix(seed ^ (uint64_t)step << 32 ^ (uint64_t)of_rank << 24 ^ (uint64_t)i); }

static Reach opened(Kind kind, int shift) {
    Reach the = {MPI_WIN_NULL, NULL, NULL, kind, 0, 0, (world_rank + shift) % world_size, 0};
    MPI_Aint num_bytes = AREA * AREAS + 8, *starts = calloc((size_t)world_size, sizeof *starts);
    the.from = ((world_rank - shift) % world_size + world_size) % world_size;
    int unit = kind == W_DYNAMIC || world_rank % 2 ? 1 : 4;
    the.unit = kind == W_DYNAMIC || the.to % 2 ? 1 : 4;
    if (kind == W_ALLOCATED) MPI_Win_allocate_c(num_bytes, unit, MPI_INFO_NULL, MPI_COMM_WORLD, &the.memory, &the.win);
    if (kind == W_SHARED) MPI_Win_allocate_shared(num_bytes, unit, MPI_INFO_NULL, MPI_COMM_WORLD, &the.memory, &the.win);
    if (kind >= W_CREATED && kind != W_SHARED) the.memory = the.created = malloc((size_t)num_bytes);
    if (kind == W_CREATED) MPI_Win_create(the.created, num_bytes, unit, MPI_INFO_NULL, MPI_COMM_WORLD, &the.win);
    if (kind == W_DYNAMIC) {
        MPI_Win_create_dynamic(MPI_INFO_NULL, MPI_COMM_WORLD, &the.win);
        MPI_Win_attach(the.win, the.created, num_bytes);
        MPI_Get_address(the.created, &starts[world_rank]);
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, starts, 1, MPI_AINT, MPI_COMM_WORLD);
        the.start = starts[the.to];
    }
    free(starts);
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, world_rank, 0, the.win);
    for (MPI_Aint i = 0; i < num_bytes; i++) the.memory[i] = at_first(world_rank, i);
    memset(the.memory + AREA * AREAS, 0, 8);
    MPI_Win_unlock(world_rank, the.win);
    MPI_Barrier(MPI_COMM_WORLD);
    return the;
}

static void see_window(Reach the) {
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, world_rank, 0, the.win);
    see_bytes(the.memory, AREA * AREAS + 8);
    MPI_Win_unlock(world_rank, the.win);
    MPI_Barrier(MPI_COMM_WORLD);
    if (the.kind == W_DYNAMIC) MPI_Win_detach(the.win, the.created);
    MPI_Win_free(&the.win);
    free(the.created);
}

static void enter(Reach the, Span span, MPI_Group to, MPI_Group from) {
    if (span == E_FENCES) MPI_Win_fence(MPI_MODE_NOPRECEDE, the.win);
    if (span == E_PARTNERS) MPI_Win_post(from, 0, the.win), MPI_Win_start(to, 0, the.win);
    if (span == E_SHARED_LOCK) MPI_Win_lock(MPI_LOCK_SHARED, the.to, 0, the.win);
    if (span == E_LOCK) MPI_Win_lock(MPI_LOCK_EXCLUSIVE, the.to, 0, the.win);
    if (span == E_UNCHECKED) MPI_Win_lock(MPI_LOCK_SHARED, the.to, MPI_MODE_NOCHECK, the.win);
    if (span == E_ALL) MPI_Win_lock_all(0, the.win);
}

static void leave(Reach the, Span span) {
    if (span == E_FENCES) MPI_Win_fence(MPI_MODE_NOSUCCEED, the.win);
    if (span == E_PARTNERS) MPI_Win_complete(the.win), MPI_Win_wait(the.win);
    if (span == E_SHARED_LOCK || span == E_LOCK || span == E_UNCHECKED) MPI_Win_unlock(the.to, the.win);
    if (span == E_ALL) MPI_Win_unlock_all(the.win);
}

/* What goes out and comes back, on this side. */
typedef struct {
    Layout mine, there;
    int num_mine, num_there;
    Room out, in;
} Load;

static void access_area(Reach the, int which, int area, Load by, uint64_t dice) {
    MPI_Aint at = (the.start + (MPI_Aint)area * AREA + AREA / 2) / the.unit;
    MPI_Op op = (MPI_Op[]){MPI_SUM, MPI_REPLACE, MPI_MAX, MPI_BXOR}[draw(&dice, 4)], back = draw(&dice, 2) ? op : MPI_NO_OP;
    MPI_Request request = MPI_REQUEST_NULL;
    char expected[4];
    int is_there = draw(&dice, 2), first = area * AREA + AREA / 2;
    for (int i = 0; i < 4; i++) expected[i] = is_there ? at_first(the.to, first + i) : 0;
#define HERE(room) room.at, by.num_mine, by.mine.type
#define THERE the.to, at, by.num_there, by.there.type
    if (which == 0) MPI_Put(HERE(by.out), THERE, the.win);
    if (which == 1) MPI_Get_c(HERE(by.in), THERE, the.win);
    if (which == 2) MPI_Accumulate(HERE(by.out), THERE, op, the.win);
    if (which == 3) MPI_Get_accumulate(HERE(by.out), HERE(by.in), THERE, back, the.win);
    if (which == 4) MPI_Fetch_and_op(by.out.at, by.in.at, MPI_INT32_T, the.to, at, back, the.win);
    if (which == 5) MPI_Compare_and_swap(by.out.at, expected, by.in.at, MPI_INT32_T, the.to, at, the.win);
    if (which == 6) MPI_Rput_c(HERE(by.out), THERE, the.win, &request);
    if (which == 7) MPI_Rget(HERE(by.in), THERE, the.win, &request);
    if (which == 8) MPI_Raccumulate(HERE(by.out), THERE, op, the.win, &request);
    if (which == 9) MPI_Rget_accumulate_c(HERE(by.out), HERE(by.in), THERE, back, the.win, &request);
    if (which > 5) MPI_Wait(&request, MPI_STATUS_IGNORE);
}

static Load load(uint64_t *dice) {
    Load by = {layout(dice), layout(dice), 0, 0, {0}, {0}};
    int whole = common(by.mine, by.there), units = draw(dice, 3);
    MPI_Aint lb, extent;
    MPI_Type_get_extent(by.there.type, &lb, &extent);
    if (units * (whole / by.there.ints) * extent > AREA / 4) units = 0;
    by.num_mine = units * (whole / by.mine.ints), by.num_there = units * (whole / by.there.ints);
    by.out = room(by.mine, by.num_mine + 1, world_rank), by.in = room(by.mine, by.num_mine + 1, -1);
    return by;
}

static void accessed(uint64_t dice) {
    current_kind = "accessed";
    Reach the = opened((Kind)draw(&dice, 4), draw(&dice, 5));
    Span span = (Span)draw(&dice, 6);
    int num = 1 + draw(&dice, AREAS), num_kinds = span < E_SHARED_LOCK ? 6 : 10;
    Load loads[AREAS];
    MPI_Group all, to, from;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, 1, &the.to, &to), MPI_Group_incl(all, 1, &the.from, &from);
    enter(the, span, to, from);
    for (int i = 0; i < num; i++) {
        loads[i] = load(&dice);
        access_area(the, draw(&dice, num_kinds), i, loads[i], dice);
        if (span >= E_SHARED_LOCK && draw(&dice, 3) == 0) MPI_Win_flush(the.to, the.win);
        if (span == E_ALL && draw(&dice, 3) == 0) MPI_Win_flush_local_all(the.win);
    }
    int64_t one = world_rank + 1;
    MPI_Aint last = (the.start + (MPI_Aint)AREA * AREAS) / the.unit;
    MPI_Accumulate(&one, 1, MPI_INT64_T, the.to, last, 1, MPI_INT64_T, MPI_SUM, the.win);
    leave(the, span);
    for (int i = 0; i < num; i++) {
        see_room(loads[i].in), free(loads[i].out.raw);
        MPI_Type_free(&loads[i].mine.type), MPI_Type_free(&loads[i].there.type);
    }
    MPI_Group_free(&to), MPI_Group_free(&from), MPI_Group_free(&all);
    see_window(the);
}

/* ---- Files: each rank has frames of its own, one after the other's ---- */

enum { FRAME = 40, FRAMES = 1040 };

/* A rank's part of a frame, in rising order, as views ask for it. */
static Layout in_frame(uint64_t *dice, int size) {
    int lengths[3] = {draw(dice, 5), draw(dice, 5), 1 + draw(dice, 5)}, starts[3] = {draw(dice, 4), 10 + draw(dice, 4), 20 + draw(dice, 4)};
    Layout made = {MPI_DATATYPE_NULL, lengths[0] + lengths[1] + lengths[2]};
    MPI_Datatype plain;
    MPI_Type_indexed(3, lengths, starts, MPI_INT32_T, &plain);
    MPI_Type_create_resized(plain, 0, (MPI_Aint)4 * FRAME * size, &made.type);
    MPI_Type_commit(&made.type), MPI_Type_free(&plain);
    return made;
}

#define ACCESS(verb)                                                                                            \
    static void verb##_some(MPI_File file, int way, MPI_Offset at, char *data, int count, Layout of, MPI_Status *status) { \
        MPI_Request request;                                                                                    \
        MPI_Datatype type = of.type;                                                                            \
        if (way > 4) MPI_File_seek(file, at, MPI_SEEK_SET);                                                     \
        if (way == 0) MPI_File_##verb##_at(file, at, data, count, type, status);                                \
        if (way == 1) MPI_File_##verb##_at_all_c(file, at, data, count, type, status);                          \
        if (way == 2) MPI_File_i##verb##_at(file, at, data, count, type, &request), MPI_Wait(&request, status); \
        if (way == 3) MPI_File_i##verb##_at_all(file, at, data, count, type, &request), MPI_Wait(&request, status); \
        if (way == 4) MPI_File_##verb##_at_all_begin(file, at, data, count, type), MPI_File_##verb##_at_all_end(file, data, status); \
        if (way == 5) MPI_File_##verb##_c(file, data, count, type, status);                                     \
        if (way == 6) MPI_File_##verb##_all(file, data, count, type, status);                                   \
        if (way == 7) MPI_File_i##verb(file, data, count, type, &request), MPI_Wait(&request, status);          \
        if (way == 8) MPI_File_##verb##_all_begin(file, data, count, type), MPI_File_##verb##_all_end(file, data, status); \
        if (way == 9) MPI_File_i##verb##_all_c(file, data, count, type, &request), MPI_Wait(&request, status);  \
    }
ACCESS(write)
ACCESS(read)

static void see_access(MPI_File file, MPI_Status *status) {
    MPI_Offset position, byte;
    int elements;
    MPI_Get_elements(status, MPI_INT32_T, &elements);
    MPI_File_get_position(file, &position);
    MPI_File_get_byte_offset(file, position + 3, &byte);
    see((int64_t[]){elements, position, byte}, 3);
}

static MPI_File open_step(MPI_Comm comm) {
    char path[64];
    int part;
    MPI_File file;
    MPI_Allreduce(&world_rank, &part, 1, MPI_INT, MPI_MIN, comm);
    snprintf(path, sizeof path, "records-%d-%d.bin", step, part);
    MPI_File_open(comm, path, MPI_MODE_CREATE | MPI_MODE_RDWR | MPI_MODE_DELETE_ON_CLOSE, MPI_INFO_NULL, &file);
    return file;
}

static void settle(MPI_File file, MPI_Comm comm) {
    MPI_File_sync(file);
    MPI_Barrier(comm);
    MPI_File_sync(file);
}

/* Through a view and out of a layout, then through the next rank's view into another layout, and all of it as it is. */
static void recorded(MPI_Comm comm, uint64_t dice) {
    current_kind = "recorded";
    Place place = place_in(comm);
    MPI_File file = open_step(comm);
    MPI_Offset start = 4 * draw(&dice, 9), at = draw(&dice, 30), size;
    Layout frame = in_frame(&dice, place.size), given = layout(&dice), taken = layout(&dice);
    int units = (int[]){0, 1, 2, 12}[draw(&dice, 4)], whole = common(given, taken), ways[2] = {draw(&dice, 10), draw(&dice, 10)};
    if (units * whole > FRAMES - 40) units = 0;
    /* What stands in gaps that nobody has written is open, unless it was there before. */
    MPI_File_set_size(file, start + (MPI_Offset)4 * FRAME * FRAMES * place.size);
    if (draw(&dice, 2)) MPI_File_set_atomicity(file, 1);
    Room data = room(given, units * (whole / given.ints), place.rank), into = room(taken, units * (whole / taken.ints), -1);
    MPI_Status status;
    MPI_File_set_view(file, start + 4 * FRAME * place.rank, MPI_INT32_T, frame.type, "native", MPI_INFO_NULL);
    write_some(file, ways[0], at, data.at, units * (whole / given.ints), given, &status);
    see_access(file, &status), settle(file, comm);
    MPI_File_set_view(file, start + 4 * FRAME * ((place.rank + 1) % place.size), MPI_INT32_T, frame.type, "native", MPI_INFO_NULL);
    read_some(file, ways[1], at, into.at, units * (whole / taken.ints), taken, &status);
    see_access(file, &status), see_room(into), settle(file, comm);
    MPI_File_set_view(file, 0, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL);
    MPI_File_get_size(file, &size);
    char *all = calloc(1, (size_t)size + 1);
    MPI_File_read_at(file, 0, all, (int)size, MPI_BYTE, &status);
    see_bytes(all, size), see_access(file, &status);
    MPI_File_close(&file);
    free(all), free(data.raw);
    MPI_Type_free(&frame.type), MPI_Type_free(&given.type), MPI_Type_free(&taken.type), drop(comm);
}

/* By the pointer that all share: one rank after the other, then all in order. */
static void appended(MPI_Comm comm, uint64_t dice) {
    current_kind = "appended";
    Place place = place_in(comm);
    MPI_File file = open_step(comm);
    Layout given = layout(&dice);
    int count = draw(&dice, 4), way = draw(&dice, 3);
    Room data = room(given, 3, place.rank), into = room(given, 3, -1);
    MPI_Offset position, size;
    MPI_Status status;
    /* What a read beyond the end puts into memory is open. */
    MPI_File_set_size(file, 1 << 17);
    MPI_File_set_view(file, 4, MPI_INT32_T, MPI_INT32_T, "native", MPI_INFO_NULL);
    for (int turn = 0; turn < place.size; turn++) {
        if (turn == place.rank) MPI_File_write_shared(file, data.at, count, given.type, &status), see_access(file, &status);
        MPI_Barrier(comm);
    }
    if (way == 0) MPI_File_write_ordered_c(file, data.at, (count + place.rank) % 3, given.type, &status);
    if (way == 1) MPI_File_write_ordered_begin(file, data.at, count, given.type), MPI_File_write_ordered_end(file, data.at, &status);
    settle(file, comm);
    MPI_File_get_position_shared(file, &position), MPI_File_get_size(file, &size);
    see((int64_t[]){position, size}, 2), settle(file, comm);
    MPI_File_seek_shared(file, draw(&dice, 2) * given.ints, MPI_SEEK_SET);
    if (way != 2) MPI_File_read_ordered(file, into.at, (count + place.rank) % 3, given.type, &status);
    else MPI_File_read_ordered_begin(file, into.at, count > 0, given.type), MPI_File_read_ordered_end(file, into.at, &status);
    see_room(into);
    MPI_File_close(&file);
    free(data.raw), MPI_Type_free(&given.type), drop(comm);
}
