/* Where are the blocks of a buffer, and are they one piece? */
#include "blocks.h"

Block block_at(const Blocks *blocks, int i) {
    Datatype *type = blocks->types ? blocks->types[i] : blocks->type;
    MPI_Count place = blocks->places.values ? count_at(blocks->places, i) : i * blocks->count;
    MPI_Aint offset = blocks->types ? (MPI_Aint)place : (MPI_Aint)place * type->extent;
    /* The buffer may be MPI_BOTTOM: its address is a number like others. */
    return (Block){(void *)((uintptr_t)blocks->buffer + (uintptr_t)offset), count_of_block(blocks, i), type};
}

int64_t bytes_of_blocks(const Blocks *blocks) {
    if (!blocks->num) return 0;
    if (!blocks->counts.values) return data_bytes(blocks->type, blocks->count) * blocks->num;
    int64_t num_bytes = 0;
    for (int i = 0; i < blocks->num; i++) num_bytes += bytes_of_block(blocks, i);
    return num_bytes;
}

bool is_one_block(const Blocks *blocks, Block *whole) {
    if (!blocks->places.values) {
        *whole = (Block){blocks->buffer, blocks->count * blocks->num, blocks->type};
        return true;
    }
    if (blocks->types) return false;
    MPI_Count first = count_at(blocks->places, 0), next = first;
    for (int i = 0; i < blocks->num; i++) {
        if (count_at(blocks->places, i) != next && count_of_block(blocks, i)) return false;
        next += count_of_block(blocks, i);
    }
    *whole = (Block){block_at(blocks, 0).at, next - first, blocks->type};
    return true;
}

static int check_type(const Datatype *type) {
    if (!type) return fail(MPI_ERR_TYPE, "the datatype is MPI_DATATYPE_NULL or none");
    if (!type->is_committed) return fail(MPI_ERR_TYPE, "the datatype is not committed: call MPI_Type_commit first");
    return MPI_SUCCESS;
}

int check_blocks(const Blocks *blocks) {
    if (!blocks->num) return MPI_SUCCESS;
    if (!blocks->types) TRY(check_type(blocks->type));
    if (!blocks->counts.values && blocks->count < 0)
        return fail(MPI_ERR_COUNT, "the count is %lld, expected 0 or more", (long long)blocks->count);
    for (int i = 0; blocks->counts.values && i < blocks->num; i++) {
        MPI_Count count = count_at(blocks->counts, i);
        if (count < 0)
            return fail(MPI_ERR_COUNT, "the count for rank %d is %lld, expected 0 or more", i, (long long)count);
        if (blocks->types && count) TRY(check_type(blocks->types[i]));
    }
    if (blocks->buffer == MPI_IN_PLACE) return fail(MPI_ERR_BUFFER, "MPI_IN_PLACE is not for this buffer of this rank");
    bool is_empty = blocks->buffer || blocks->types || blocks->counts.values || !blocks->count;
    if (!is_empty && blocks->type->is_dense && blocks->type->size)
        return fail(MPI_ERR_BUFFER, "the buffer is NULL, expected %lld elements", (long long)blocks->count);
    return MPI_SUCCESS;
}

int take_types(Blocks *blocks, int num, const MPI_Datatype types[]) {
    blocks->types = NEW_ARRAY(Datatype *, num);
    blocks->num = num;
    for (int i = 0; i < num; i++) {
        Datatype *type = datatype_of(types[i]);
        /* Nothing needs no type. */
        if (!type && !count_of_block(blocks, i)) type = datatype_of(MPI_BYTE);
        if (!type) {
            drop_types(blocks);
            return fail(MPI_ERR_TYPE, "the datatype for rank %d is MPI_DATATYPE_NULL or none", i);
        }
        keep(type);
        blocks->types[i] = type;
    }
    return MPI_SUCCESS;
}

void drop_types(Blocks *blocks) {
    if (!blocks->types) return;
    for (int i = 0; i < blocks->num; i++) let_go(blocks->types[i]);
    free(blocks->types);
    blocks->types = NULL;
}

void own_counts(Counts *counts, int num) {
    if (!counts->values) return;
    size_t num_bytes = (size_t)(num > 0 ? num : 1) * (size_t)counts->width;
    void *copy = must_have(malloc(num_bytes));
    counts->values = num > 0 ? memcpy(copy, counts->values, num_bytes) : copy;
}

void drop_counts(Counts *counts) {
    free((void *)(uintptr_t)counts->values);
    counts->values = NULL;
}

void own_arrays(Blocks *blocks) {
    own_counts(&blocks->counts, blocks->num);
    own_counts(&blocks->places, blocks->num);
}

void drop_own_counts(Blocks *blocks) {
    drop_counts(&blocks->counts);
    drop_counts(&blocks->places);
}

void pack_blocks(const Blocks *blocks, void *to) {
    char *at = to;
    for (int i = 0; i < blocks->num; i++) {
        Block block = block_at(blocks, i);
        pack_elements(block.at, block.count, block.type, at);
        at += data_bytes(block.type, block.count);
    }
}

void unpack_blocks(const Blocks *blocks, const void *from) {
    const char *at = from;
    for (int i = 0; i < blocks->num; i++) {
        Block block = block_at(blocks, i);
        int64_t num_bytes = data_bytes(block.type, block.count);
        unpack_elements(at, num_bytes, block.at, block.count, block.type);
        at += num_bytes;
    }
}
