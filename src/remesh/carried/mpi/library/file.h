/* Parallel files, on plain descriptors of the program and collectives of a communicator of their own.
 *
 * No MPI library's files are used: each rank reads and writes its own runs of bytes, and what is collective ends when all
 * ranks have done their part, with one outcome for all. Source: MPI 4.1, chapter 14.
 */
#ifndef REMESH_FILE_H
#define REMESH_FILE_H

#include "comm.h"
#include "datatype.h"

/* What a process sees of a file: from `displacement` on a tile is laid into it again and again; the bytes of its segments,
 * in order, are the data of the view, as if they stood alone. Offsets count etypes of data.
 */
typedef struct {
    int64_t offset, length; /* in the tile, bytes */
    int64_t before;         /* data of the tile before it, bytes */
} Stretch;

typedef struct {
    int64_t displacement, etype_bytes;
    int64_t size, extent; /* of a tile: its data, and from one to the next; bytes */
    bool is_dense;
    MPI_Count num_stretches;
    Stretch *stretches;
} View;

/* What has begun and not ended: one split collective for each file and process. Source: MPI 4.1, section 14.4.5. */
typedef struct {
    const char *name; /* of its call, without _begin; NULL: none */
    int64_t num_bytes;
    int error;
    char words[512];
} Split;

struct File {
    Object object;
    Comm *comm; /* of its own */
    char *path;
    int descriptor, amode;
    Info *info;
    View view;
    Datatype *etype, *filetype;
    int64_t position;       /* of its own pointer, etypes of the view */
    int64_t shared;         /* the pointer that all share, in the memory of the first rank */
    bool is_atomic;
    bool is_dirty;          /* this rank has written since its last flush */
    Split split;
};

/* file_view.c */
/* MPI_ERR_ARG unless the parts of a view go together. The caller owns what it holds. */
INTERNAL int make_view(int64_t displacement, const Datatype *etype, const Datatype *filetype, bool is_read_only,
                       View *view);
INTERNAL void drop_view(View *view);
/* Positions of the first and behind the last of so many data bytes, at least one, from data byte `start` on. */
INTERNAL void find_span(const View *view, int64_t start, int64_t num_bytes, int64_t *first, int64_t *end);
/* Position in the file of the etype at an offset. */
INTERNAL int64_t byte_offset(const View *view, int64_t offset);
/* Etypes of which some data lie before a position: with the size of the file, where MPI_SEEK_END is. */
INTERNAL int64_t etypes_before(const View *view, int64_t end);
/* Moves data until all have been or the file ends; 0 or an errno, and how many bytes were moved. */
INTERNAL int move_data(const File *file, bool writes, int64_t start, char *memory, int64_t num_bytes, int64_t *done);

/* file.c */
/* The error that one of the system's is in MPI: fail() with the name of the file. */
INTERNAL int fail_of_system(const char *call, const char *path, int error);
INTERNAL int expect_random_access(const File *file, const char *call);

/* file_shared.c: the pointer that all share. */
INTERNAL int make_shared_pointer(File *file);
INTERNAL int free_shared_pointer(File *file);
INTERNAL int get_shared(File *file, int64_t *position);
/* All ranks call; it is there when this ends. */
INTERNAL int set_shared(File *file, int64_t position);
/* Where this rank's etypes begin when ranks take theirs as they come. */
INTERNAL int take_shared(File *file, int64_t num_etypes, int64_t *start);
/* The same when all ranks take theirs in order of ranks; all ranks call. */
INTERNAL int take_in_turn(File *file, int64_t num_etypes, int64_t *start);

#endif
