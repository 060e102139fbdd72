/* Both ends of the line between a seat and the program that gets its place. */
#ifndef REMESH_SEAT_H
#define REMESH_SEAT_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

/* A place in a job. `variables` ends with NULL, as environ does; all of it is one block for free(). */
typedef struct {
    int line;       /* to the seat */
    int descriptor; /* of the process manager; PMI_FD says its number. -1: it has none */
    char **variables;
} Seat;

/* The seat's end: -1 or a line; whether it was handed over. errno says why not. */
int reach_seat_line(const char *path);
bool hand_over_seat(int line, char *const *variables, int descriptor);

/* The program's end. Waits for the seat of a path; false with errno. From then on the program is killed when its seat is. */
bool take_seat(const char *path, Seat *seat);
/* The seat ends with a status, and its place in the job with it. */
void leave_seat(Seat *seat, int status);

#endif
