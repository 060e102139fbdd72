/* What all files of the library share: objects behind handles, errors, counts of two sizes, and statuses.
 *
 * The library is MPI for one program: its upper half in C. Every function MPI_X of the standard is made by generate.py. It
 * turns handles into the objects below, checks them and what the standard says of counts, calls do_X, which is written
 * by hand, and gives what went wrong to the error handler of the communicator, window or file. do_X returns MPI_SUCCESS
 * or an error class; fail() returns the class with words that say more. What needs another rank goes through channel.h.
 */
#ifndef REMESH_CORE_H
#define REMESH_CORE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mpi.h"
#include "visibility.h"

#define PRINTF(text, first) __attribute__((format(printf, text, first)))

/* ---- Objects ---- */

typedef enum {
    KIND_COMM, KIND_GROUP, KIND_DATATYPE, KIND_FILE, KIND_ERRHANDLER, KIND_OP, KIND_INFO, KIND_REQUEST, KIND_WIN,
    KIND_SESSION, KIND_MESSAGE, NUM_KINDS
} ObjectKind;

typedef struct Object Object;
typedef struct Comm Comm;             /* comm.h */
typedef struct Group Group;           /* group.h */
typedef struct Datatype Datatype;     /* datatype.h */
typedef struct File File;             /* file.h */
typedef struct Errhandler Errhandler; /* errors.h */
typedef struct Op Op;                 /* op.h */
typedef struct Info Info;             /* info.h */
typedef struct Request Request;       /* request.h */
typedef struct Win Win;               /* win.h */
typedef struct Session Session;       /* environment.c */
typedef struct Message Message;       /* request.h */

/* What every object begins with. Where handles are pointers, a program holds the address of `magic`. */
struct Object {
    uint64_t magic;  /* OBJECT_MAGIC as long as there is the object */
    Object *object;  /* itself; in the memory of a predefined handle of Open MPI's: the object that it stands for */
    uintptr_t handle;
    _Atomic int references;
    int fortran;     /* its number in Fortran, where handles are no integers; 0: it has none yet */
    Errhandler *errhandler; /* of a communicator, window, file or session; NULL: the default one */
    uint8_t kind;
    bool is_predefined;
    bool is_freed;   /* by the program; somebody else still needs it */
};
#define OBJECT_MAGIC 0x6873656d65726d72u

/* objects.c. All may be called by any thread. */
/* A zeroed object of `size` bytes that begins with an Object, with one reference and a handle of its own. */
INTERNAL void *make_object(ObjectKind kind, size_t size);
/* The same object behind a predefined handle, for as long as the process lives. */
INTERNAL void *make_predefined(ObjectKind kind, size_t size, uintptr_t handle);
/* Gives the same object to one more predefined handle, where a face has several names for it. */
INTERNAL void add_predefined_handle(void *object, uintptr_t handle);
/* The object behind a handle; NULL if it is a null handle, or none of this kind. */
INTERNAL void *object_of(ObjectKind kind, uintptr_t handle);
INTERNAL void keep(void *object);
/* At the last reference: `destroy` of the object's kind, and the memory goes. NULL is allowed. */
INTERNAL void let_go(void *object);
INTERNAL void set_destructor(ObjectKind kind, void (*destroy)(void *object));
/* The program has freed its handle: nobody finds the object by it any more; it lives until its last reference. */
INTERNAL void free_handle(void *object);
/* Fortran's number of an object, and back; 0 and NULL for null handles where handles are no integers. */
INTERNAL MPI_Fint fortran_of(ObjectKind kind, uintptr_t handle);
INTERNAL uintptr_t handle_of_fortran(ObjectKind kind, MPI_Fint number);
#if defined(FACE_OPENMPI)
/* fortran.c: the numbers of predefined handles, which mpif.h has. */
INTERNAL bool number_of_predefined(ObjectKind kind, uintptr_t handle, MPI_Fint *number);
INTERNAL uintptr_t predefined_of_number(ObjectKind kind, MPI_Fint number);
#endif

#define BITS(handle) ((uintptr_t)(handle))
#define HANDLE_TYPE(Type, name, KIND)                                                                             \
    static inline Type *name##_of(MPI_##Type handle) { return (Type *)object_of(KIND, BITS(handle)); }            \
    static inline MPI_##Type name##_handle(const Type *object) {                                                  \
        return (MPI_##Type)((const Object *)(const void *)object)->handle;                                        \
    }
HANDLE_TYPE(Comm, comm, KIND_COMM)
HANDLE_TYPE(Group, group, KIND_GROUP)
HANDLE_TYPE(Datatype, datatype, KIND_DATATYPE)
HANDLE_TYPE(File, file, KIND_FILE)
HANDLE_TYPE(Errhandler, errhandler, KIND_ERRHANDLER)
HANDLE_TYPE(Op, op, KIND_OP)
HANDLE_TYPE(Info, info, KIND_INFO)
HANDLE_TYPE(Request, request, KIND_REQUEST)
HANDLE_TYPE(Win, win, KIND_WIN)
HANDLE_TYPE(Session, session, KIND_SESSION)
HANDLE_TYPE(Message, message, KIND_MESSAGE)

/* ---- Errors (errors.c) ---- */

/* Notes words for the error that is about to be returned, and returns its class. */
INTERNAL int fail(int error_class, const char *format, ...) PRINTF(2, 3);
/* The error that is returned belongs to this object (a communicator, window, file): its handler gets it. */
INTERNAL int fail_on(void *object, int error_class, const char *format, ...) PRINTF(3, 4);
/* How every function of MPI ends: gives an error to the handler of `holder` (NULL: the default one), or returns it. */
INTERNAL int end_call(int error, void *holder, const char *function);
/* The same for a function that is not carried. */
INTERNAL int refuse_call(const char *function);
/* Ends the job with a line on stderr. */
INTERNAL _Noreturn void die(const char *format, ...) PRINTF(1, 2);
/* malloc and realloc that do not return NULL. */
INTERNAL void *must_have(void *memory);
#define NEW(Type) ((Type *)must_have(calloc(1, sizeof(Type))))
#define NEW_ARRAY(Type, count) ((Type *)must_have(calloc((size_t)((count) > 0 ? (count) : 1), sizeof(Type))))

#define TRY(call)                    \
    do {                             \
        int error_ = (call);         \
        if (error_) return error_;   \
    } while (0)

/* ---- Counts of two sizes ---- */

/* An array of int, MPI_Aint or MPI_Count as the program gave it: the same code serves MPI_X and MPI_X_c. */
typedef struct {
    const void *values;
    int width; /* bytes of an element: 4 or 8 */
} Counts;
static inline MPI_Count count_at(Counts counts, MPI_Count index) {
    return counts.width == 4 ? ((const int *)counts.values)[index] : (MPI_Count)((const int64_t *)counts.values)[index];
}

/* ---- Statuses ---- */

/* Fill what a program gave for a status, which may be MPI_STATUS_IGNORE; MPI_ERROR stays as it is. */
static inline void set_status(MPI_Status *status, int source, int tag, int64_t num_bytes, bool is_cancelled) {
    if (status == MPI_STATUS_IGNORE) return;
    status->MPI_SOURCE = source;
    status->MPI_TAG = tag;
#if defined(FACE_MPICH)
    status->count_lo = (int)(uint32_t)num_bytes;
    status->count_hi_and_cancelled = (int)((uint32_t)((uint64_t)num_bytes >> 32) << 1 | is_cancelled);
#elif defined(FACE_OPENMPI)
    status->_ucount = (size_t)num_bytes;
    status->_cancelled = is_cancelled;
#else
    memcpy(status->MPI_internal, &num_bytes, sizeof num_bytes);
    status->MPI_internal[2] = is_cancelled;
#endif
}
static inline void set_empty_status(MPI_Status *status) {
    set_status(status, MPI_ANY_SOURCE, MPI_ANY_TAG, 0, false);
    if (status != MPI_STATUS_IGNORE) status->MPI_ERROR = MPI_SUCCESS;
}
static inline int64_t status_bytes(const MPI_Status *status) {
#if defined(FACE_MPICH)
    return (int64_t)((uint64_t)(uint32_t)status->count_lo | (uint64_t)((uint32_t)status->count_hi_and_cancelled >> 1) << 32);
#elif defined(FACE_OPENMPI)
    return (int64_t)status->_ucount;
#else
    int64_t num_bytes;
    memcpy(&num_bytes, status->MPI_internal, sizeof num_bytes);
    return num_bytes;
#endif
}
static inline bool status_cancelled(const MPI_Status *status) {
#if defined(FACE_MPICH)
    return status->count_hi_and_cancelled & 1;
#elif defined(FACE_OPENMPI)
    return status->_cancelled;
#else
    return status->MPI_internal[2] & 1;
#endif
}
/* The i-th of an array that may be MPI_STATUSES_IGNORE. */
static inline MPI_Status *status_at(MPI_Status *statuses, MPI_Count index) {
    return statuses == MPI_STATUSES_IGNORE ? MPI_STATUS_IGNORE : statuses + index;
}

/* ---- The process ---- */

typedef struct {
    int rank, size;           /* in the world, once started */
    atomic_bool is_started, is_ended;
    pthread_mutex_t guard;    /* recursive; of tables and counters; never held during a call of the lower half */
} Process;
INTERNAL extern Process process;
#define LOCKED for (int once_ = (pthread_mutex_lock(&process.guard), 1); once_; once_ = (pthread_mutex_unlock(&process.guard), 0))

#include "internal.h"

#endif
