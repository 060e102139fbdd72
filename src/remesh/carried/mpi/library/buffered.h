/* Buffers that a program attaches for buffered sends. */
#ifndef REMESH_BUFFERED_H
#define REMESH_BUFFERED_H

#include "request.h"

/* What a process or communicator has attached; its address is the mark of the sends that are pending for it. */
typedef struct BufferedSends {
    bool is_attached;
    void *at;
    MPI_Count size;
} BufferedSends;

INTERNAL int attach_buffer(BufferedSends *to, void *buffer, MPI_Count size);
/* Waits until all that is pending for it has been taken. `buffer_addr` points to the program's pointer. */
INTERNAL int detach_buffer(BufferedSends *from, void *buffer_addr, MPI_Count *size);

#endif
