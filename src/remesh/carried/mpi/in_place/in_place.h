/* The upper half's view of a lower half in its own process: load it, call into it, drop it.
 *
 *     const char *error = load_lower(program, library_path, environment, &functions);
 *     ...
 *     int code = CROSS("MPI_Send", functions->send(data, count, dest, tag));
 *     ...
 *     error = end_lower();
 *
 * There is one lower half at a time. Any thread of the program may cross, as many as there are; load and drop are called
 * by one thread while no other one is inside.
 */
#ifndef REMESH_IN_PLACE_H
#define REMESH_IN_PLACE_H

#include "halves.h"
#include "region.h"

/* What this machine or this process lacks for it, in words; NULL if nothing. */
const char *what_is_lacking(void);
/* Load a program that was linked with lower_half.c. NULL, or what went wrong; then nothing is left of it. */
const char *load_lower(const char *program, const char *library_path, char *const *environment, const void **functions);
/* It ends as a program does, with what its libraries do then, and all of it goes. For an MPI that is finalized. */
const char *end_lower(void);
/* All of it is gone at once. Both return NULL, or what stays and why; then drop_lower() can be called again. */
const char *drop_lower(void);

/* A thread of the program, as the halves see it. */
typedef struct Crossing {
    Place *place;     /* what it borrows; NULL: nothing yet */
    uint64_t fs, own; /* thread pointers in the lower half and in the program */
    struct Crossing *next, **link;
} Crossing;
extern _Thread_local Crossing my_crossing __attribute__((tls_model("initial-exec")));
/* Lend thread-local storage to the calling thread, until it ends or the lower half is dropped. */
void borrow_place(void);

/* An expression that is evaluated in the lower half, its value. Its arguments are evaluated there, too: they must be
 * plain variables of the calling function, and nothing of the program's C library.
 */
#define CROSS(name, call)                                                    \
    __extension__({                                                          \
        if (__builtin_expect(my_crossing.place == NULL, 0)) borrow_place();  \
        uint64_t own_ = my_crossing.own;                                     \
        my_crossing.place->doing = (name);                                   \
        set_thread_pointer(my_crossing.fs);                                  \
        __auto_type value_ = (call);                                         \
        set_thread_pointer(own_);                                            \
        value_;                                                              \
    })

/* Between the files of the upper half. */
void begin_places(Handover *handover);
void end_places(void);
const char *enter_signals_through_us(const Handover *handover);

#endif
