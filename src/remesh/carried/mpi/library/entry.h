/* What the entry points that generate.py makes need besides core.h. */
#ifndef REMESH_ENTRY_H
#define REMESH_ENTRY_H

#include "core.h"

/* environment.c: whether functions that need a started MPI may be called; a session counts. */
INTERNAL bool is_running(void);
/* What such a function returns when they may not: MPI is not started, or over. */
INTERNAL int not_running(const char *function);
/* errors.c: who has the error handler of functions on files that have no file yet. */
INTERNAL void *file_errors(void);
/* probe.c: the same for a message; NULL: the default one. */
INTERNAL void *message_errors(MPI_Message handle);

/* A number that the small form of a function cannot return is MPI_UNDEFINED. Source: MPI 4.1, section 2.5.8. */
static inline int narrow(MPI_Count value) { return value > INT_MAX || value < INT_MIN ? MPI_UNDEFINED : (int)value; }

#endif
