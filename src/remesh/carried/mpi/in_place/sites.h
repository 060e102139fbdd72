/* Places in machine code that make system calls, and their rewriting: see sites.c. */
#ifndef REMESH_SITES_H
#define REMESH_SITES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_CALLS 512 /* numbers of system calls are below */

/* Where stubs are written, and where they lead. The memory is within 2 GiB of the code that is rewritten. */
typedef struct {
    unsigned char *next, *end;
    /* Words in reach of the stubs, with addresses of functions in serve.S: what serves a call, and what is called before
     * and after one that makes a thread or process, after it by both. NULL where none of those is served.
     */
    void (*const *serve)(void), (*const *before)(void), (*const *after)(void);
    const uint64_t *served;     /* bits: the calls that are rewritten */
} Stubs;

/* Rewrite the sites in code that nobody runs yet and that can be written: how many, or -1 if the stubs have no room. */
int rewrite_sites(Stubs *stubs, unsigned char *code, size_t num_bytes);
/* Whether there is a site in so many bytes; they are read only. */
bool has_sites(const Stubs *stubs, const unsigned char *code, size_t num_bytes);
/* Rewrite the sites in code that other threads may run; false if one lies so that it cannot be changed in one step. */
bool rewrite_sites_alive(Stubs *stubs, unsigned char *code, size_t num_bytes, bool is_alone, int *num_sites);

#endif
