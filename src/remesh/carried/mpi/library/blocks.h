/* Blocks: the parts of a buffer that go to ranks or come from them, in order of ranks. */
#ifndef REMESH_BLOCKS_H
#define REMESH_BLOCKS_H

#include "datatype.h"

/* They refer to the program's arrays; own_arrays() copies those for what goes on after the call. */
typedef struct {
    char *buffer;
    int num;         /* 0: nothing; one block may serve many ranks */
    MPI_Count count; /* of each, where `counts` has no values */
    Counts counts;
    Counts places;   /* where each begins: in extents, in bytes if there are `types`; no values: one after another */
    Datatype *type;  /* of all, or NULL */
    Datatype **types; /* of each; owned, and each kept: see drop_types() */
} Blocks;

typedef struct {
    void *at;
    MPI_Count count;
    Datatype *type;
} Block;

/* What a program says of a buffer; `num` is to be set. The first is a single block. */
static inline Blocks one_block(const void *buffer, MPI_Count count, Datatype *type) {
    return (Blocks){.buffer = (char *)(uintptr_t)buffer, .num = 1, .count = count, .type = type};
}
static inline Blocks even_blocks(const void *buffer, MPI_Count count, Datatype *type) {
    return (Blocks){.buffer = (char *)(uintptr_t)buffer, .count = count, .type = type};
}
static inline Blocks uneven_blocks(const void *buffer, Counts counts, Counts places, Datatype *type) {
    return (Blocks){.buffer = (char *)(uintptr_t)buffer, .counts = counts, .places = places, .type = type};
}

static inline MPI_Count count_of_block(const Blocks *blocks, int i) {
    return blocks->counts.values ? count_at(blocks->counts, i) : blocks->count;
}
static inline int64_t bytes_of_block(const Blocks *blocks, int i) {
    return data_bytes(blocks->types ? blocks->types[i] : blocks->type, count_of_block(blocks, i));
}
INTERNAL Block block_at(const Blocks *blocks, int i);
INTERNAL int64_t bytes_of_blocks(const Blocks *blocks);
/* Whether all blocks together are a single one; then it is `whole`. */
INTERNAL bool is_one_block(const Blocks *blocks, Block *whole);
/* An error of the program's, or MPI_SUCCESS. */
INTERNAL int check_blocks(const Blocks *blocks);
/* Looks up and keeps the types that a program gives one by one; of this many blocks. */
INTERNAL int take_types(Blocks *blocks, int num, const MPI_Datatype types[]);
INTERNAL void drop_types(Blocks *blocks);
/* Copies of a program's arrays, and their end. */
INTERNAL void own_counts(Counts *counts, int num);
INTERNAL void own_arrays(Blocks *blocks);
INTERNAL void drop_counts(Counts *counts);
INTERNAL void drop_own_counts(Blocks *blocks);
INTERNAL void pack_blocks(const Blocks *blocks, void *to);
INTERNAL void unpack_blocks(const Blocks *blocks, const void *from);

#endif
