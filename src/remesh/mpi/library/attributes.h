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
/* What the program gave for a keyval. Of another language than C: functions that know how to call its functions, and
 * what a library of that language gave for them.
 */
typedef struct KeyvalFunctions KeyvalFunctions;
struct KeyvalFunctions {
    Callback *copy, *delete;
    void *extra_state;
    int (*call_copy)(const KeyvalFunctions *own, Object *of, int keyval, void *value, void **copied, int *flag);
    int (*call_delete)(const KeyvalFunctions *own, Object *of, int keyval, void *value);
    Callback *copy_proxy, *delete_proxy;
};
INTERNAL int create_keyval(ObjectKind kind, KeyvalFunctions functions, int *keyval);
/* To be completed right after that; NULL: there is no such keyval. */
INTERNAL KeyvalFunctions *functions_of_keyval(int keyval);
/* What stands under MPI_WIN_BASE and its like; false: there is no such keyval (win.c). */
INTERNAL bool predefined_of_window(Win *win, int keyval, void **value);

#endif
