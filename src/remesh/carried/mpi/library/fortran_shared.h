/* What the entry points for Fortran share, whichever library they stand in: that of Open MPI's face, or MPICH's apart. */
#ifndef REMESH_FORTRAN_SHARED_H
#define REMESH_FORTRAN_SHARED_H

#include <mpi.h>
#include <stdbool.h>
#include <stddef.h>

#include "visibility.h"

/* Returns the error as well. In mpi_f08 a program may do without it. */
static inline int tell(MPI_Fint *ierror, int error) {
    if (ierror) *ierror = error;
    return error;
}

/* The longest text that a function gives, with its end. */
enum { MAX_TEXT = 8192 };

/* The C value that an address stands for: Fortran's constants are common blocks. */
INTERNAL void *buffer_of(void *buffer);
INTERNAL MPI_Status *status_of(MPI_Fint *status);
INTERNAL int *weights_of(MPI_Fint *weights);
/* A text without the blanks around it, to be freed. */
INTERNAL char *text_of_fortran(const char *text, size_t length);
/* Blanks behind it, if there is one. */
INTERNAL void text_to_fortran(bool is_there, const char *text, char *to, size_t length);
INTERNAL void count_from_one(int *indices, int count);
/* How many datatypes a call has that has one for each rank of a communicator, or each neighbour; none of what is sent in
 * place.
 */
typedef enum { SENT, RECEIVED } Side;
INTERNAL int num_types(MPI_Fint comm, bool is_near, Side side, void *buffer);

#endif
