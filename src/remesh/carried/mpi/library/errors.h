/* Error handlers, and the words of errors. */
#ifndef REMESH_ERRORS_H
#define REMESH_ERRORS_H

#include "core.h"

struct Errhandler {
    Object object;
    enum { HANDLER_FATAL, HANDLER_ABORT, HANDLER_RETURN, HANDLER_OF_PROGRAM } what;
    ObjectKind holder;      /* of the program's own: what its function is for */
    void (*function)(void); /* MPI_Comm_errhandler_function and its like */
    /* Calls the function, of a language whose arguments are others; NULL for C. */
    void (*call)(const struct Errhandler *handler, uintptr_t handle, int *error);
    void (*partner)(void); /* of C++: the other one of two functions (cxx.c) */
};

INTERNAL void make_predefined_errhandlers(void);
#if defined(FACE_MPICH) || defined(FACE_OPENMPI)
INTERNAL void make_predefined_errhandlers_of_cxx(void);
#endif
/* The largest error code in use: MPI_LASTUSEDCODE. */
INTERNAL int last_used_code(void);
/* The face's error class for a number of calls/error_classes.py. */
INTERNAL int class_of_lower(int number);
/* The words noted last in this thread; "" if none. */
INTERNAL const char *noted_words(void);
/* The object, or its default handler if it is none of its own. */
INTERNAL Errhandler *handler_of(const Object *holder);

#endif
