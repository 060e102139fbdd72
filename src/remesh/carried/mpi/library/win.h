/* Windows: memory of this process that other ranks read and write.
 *
 * The memory stays in the program, and with it in the image. The lower half knows a window's number, base and memory,
 * and serves the others' accesses while the program computes. Accesses are carried out at once, whatever the epoch, and
 * are pending until they are answered. Source: MPI 4.1, chapter 12.
 */
#ifndef REMESH_WIN_H
#define REMESH_WIN_H

#include "attributes.h"
#include "comm.h"
#include "shared_memory.h"

/* What this rank has of another's lock. LOCK_UNASKED: the program said that there is no conflict (MPI_MODE_NOCHECK). */
typedef enum { NOT_LOCKED, LOCK_HELD, LOCK_UNASKED } LockState;

/* After a fence there is an epoch from the first access on: until then one of another kind may begin. */
typedef enum { NOT_FENCED, FENCED, FENCED_AND_ACCESSED } FenceState;

/* Accesses to one rank that nobody has waited for. */
typedef struct {
    int rank;
    bool is_own;      /* the program has its request, too, and gets its error */
    Request *request; /* kept */
} Pending;

struct Win {
    Object object;
    Comm *comm;       /* its own: nobody else sends on it; its number is the window's */
    int flavor, model;
    void *base;       /* what this rank gives; of a dynamic window nothing */
    bool owns_memory; /* the library has allocated it */
    MPI_Aint size;
    MPI_Aint *units;  /* by rank: bytes that displacements count in */
    MPI_Aint *sizes;  /* by rank: bytes that it gave */
    int own_unit;     /* what MPI_WIN_DISP_UNIT points to */
    SharedMemory *shared; /* of MPI_Win_allocate_shared; else NULL */
    struct Attached *attached; /* memory of a dynamic window; win_make.c */
    Attributes attributes;
    Info *info;
    char name[MPI_MAX_OBJECT_NAME];
    /* Epochs; pending accesses are under process.guard. */
    Pending *pending;
    int64_t num_pending, room_pending;
    FenceState fence;
    bool is_locked_all;
    int num_locked;
    uint8_t *locked;  /* by rank: LockState */
    int num_started;  /* partners to access; -1: no epoch */
    int *started;     /* their ranks */
    Request **words;  /* by rank: a partner's word that it has posted; NULL: none is waited for */
    bool *is_partner; /* by rank */
    Request *exposed; /* partners' words that they have completed; NULL: not exposed */
};

/* ---- win_epochs.c ---- */
INTERNAL int check_window_rank(const Win *win, int rank);
/* Whether this rank may access that one now; waits until it has posted. */
INTERNAL int check_epoch(Win *win, int rank);
/* MPI_ERR_RMA_SYNC in an epoch of accesses to partners, or of theirs, or under locks; `what`: what would begin or end. */
INTERNAL int expect_no_epoch(const Win *win, const char *what);
/* An access has begun. The request is kept if it is the program's own, and taken if not. */
INTERNAL int note_access(Win *win, int rank, Request *request, bool is_own);
/* Until all accesses to this rank are over, or to all (MPI_ANY_SOURCE); the first error. */
INTERNAL int flush_accesses(Win *win, int rank);

#endif
