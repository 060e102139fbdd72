/* Attributes: what a program hangs on a communicator, datatype or window under a key. */
#ifndef REMESH_ATTRIBUTES_H
#define REMESH_ATTRIBUTES_H

#include "core.h"

typedef struct {
    struct Attribute *first; /* newest first; attributes.c */
} Attributes;

/* All take the object as the program knows it, for its callbacks. */
/* Copies what the copy functions let through, in the order in which it was set; stops at the first error. */
INTERNAL int copy_attributes(Object *from, const Attributes *of, Attributes *to);
/* Deletes all, newest first; stops at the first error. */
INTERNAL int delete_attributes(Object *object, Attributes *attributes);

#endif
