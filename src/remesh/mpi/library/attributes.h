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
typedef void Callback(void);
/* What the program gave for a keyval. Of another language than C: functions that know how to call its functions. */
typedef struct {
    Callback *copy, *delete;
    void *extra_state;
    int (*call_copy)(Callback *copy, Object *of, int keyval, void *extra_state, void *value, void **copied, int *flag);
    int (*call_delete)(Callback *delete, Object *of, int keyval, void *value, void *extra_state);
} KeyvalFunctions;
INTERNAL int create_keyval(ObjectKind kind, KeyvalFunctions functions, int *keyval);
/* What stands under MPI_WIN_BASE and its like; false: there is no such keyval (win.c). */
INTERNAL bool predefined_of_window(Win *win, int keyval, void **value);

#endif
