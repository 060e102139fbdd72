/* Start and end of MPI in this process. */
#ifndef REMESH_ENVIRONMENT_H
#define REMESH_ENVIRONMENT_H

#include "core.h"

/* The process learns its rank and makes the world; the second time nothing happens. For MPI_Init and MPI_Session_init. */
INTERNAL int start_process(void);
/* Tells the lower half that MPI is over, for now: sessions may begin again. For MPI_Finalize and the last session. */
INTERNAL int end_process(void);
/* The number of sessions that are open; one is enough for functions that need MPI. session.c changes it. */
INTERNAL extern atomic_int num_sessions;

#endif
