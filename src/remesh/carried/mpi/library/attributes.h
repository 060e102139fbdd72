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
/* C sets and sees addresses, Fortran numbers of that size; C++ does as C. What was set in Fortran is in C the address of
 * the number; what was set in C is in Fortran the address as a number. Source: MPI 4.1, section 19.3.7.
 */
typedef enum { IN_C, IN_FORTRAN } Language;
typedef void Callback(void);
/* What the program gave for a keyval. Of another language than C: functions that know how to call its functions, and
 * what a library of that language gave for them. They get a value as it was set.
 */
typedef struct KeyvalFunctions KeyvalFunctions;
struct KeyvalFunctions {
    Callback *copy, *delete;
    void *extra_state;
    int (*call_copy)(const KeyvalFunctions *own, Object *of, int keyval, Language set_in, void *value, void **copied,
                     int *flag);
    int (*call_delete)(const KeyvalFunctions *own, Object *of, int keyval, Language set_in, void *value);
    Callback *copy_proxy, *delete_proxy;
};
INTERNAL int create_keyval(ObjectKind kind, KeyvalFunctions functions, int *keyval);
/* To be completed right after that; NULL: there is no such keyval. */
INTERNAL KeyvalFunctions *functions_of_keyval(int keyval);
/* MPI's functions for a caller of another language. A predefined attribute, which C gets the address of, is in Fortran
 * the value.
 */
INTERNAL int set_comm_attribute(MPI_Comm comm, int keyval, Language language, void *value);
INTERNAL int get_comm_attribute(MPI_Comm comm, int keyval, Language language, void *value, int *flag);
INTERNAL int set_type_attribute(MPI_Datatype type, int keyval, Language language, void *value);
INTERNAL int get_type_attribute(MPI_Datatype type, int keyval, Language language, void *value, int *flag);
INTERNAL int set_win_attribute(MPI_Win win, int keyval, Language language, void *value);
INTERNAL int get_win_attribute(MPI_Win win, int keyval, Language language, void *value, int *flag);
/* What stands under MPI_WIN_BASE and its like; false: there is no such keyval (win.c). */
INTERNAL bool predefined_of_window(Win *win, int keyval, void **value);

#endif
