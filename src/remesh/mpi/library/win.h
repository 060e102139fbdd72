/* Windows: memory of this process that other ranks read and write. */
#ifndef REMESH_WIN_H
#define REMESH_WIN_H

#include "attributes.h"
#include "comm.h"

struct Win {
    Object object;
    Comm *comm;       /* its own: nobody else sends on it; its number is the window's */
    int flavor, model;
    void *base;       /* what this rank gives; of a dynamic window nothing */
    MPI_Aint size;
    MPI_Aint *units;  /* by rank: bytes that displacements count in */
    MPI_Aint *sizes;  /* by rank: bytes that it gave */
    int own_unit;     /* what MPI_WIN_DISP_UNIT points to */
    Attributes attributes;
    Info *info;
    char name[MPI_MAX_OBJECT_NAME];
};

#endif
