/* The region of addresses that the lower half lives in, and what else belongs to it: see region.c. */
#ifndef REMESH_REGION_H
#define REMESH_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "halves.h"

#define REGION_START 0x200000000000ul
#define CODE_BYTES (1ul << 30) /* of its first part, with code: all of it is in reach of a jump */
#define REGION_BYTES (1ul << 42)
#define PAGE 4096ul
#define PAGE_UP(bytes) (((bytes) + PAGE - 1) & ~(PAGE - 1))

enum { MAX_DESCRIPTORS = 1 << 20, MAX_THREADS = 4096, MAX_SEGMENTS = 256, MAX_STRAYS = 64 };

/* Take the addresses; false if something of the program lies there, or nothing can be mapped with code that is made. */
bool open_region(void);
/* mmap at addresses of the region that are free, in its part for code or in the other one; -ENOMEM if there are none. */
long map_in_region(size_t num_bytes, int protection, int flags, int fd, long offset, bool near);
/* Rewrite what makes system calls in code that was just mapped; -1 if there is no room for it. */
int rewrite_code(unsigned char *code, size_t num_bytes);
/* A descriptor that the program gives to the lower half: it goes with it. */
void give_descriptor(int fd);
/* Where a lower half that ends while it starts goes on; NULL when it has started. */
void set_way_back(Context *back);
int status_of_end(void);

/* What there is of the lower half now. */
typedef struct {
    int num_threads, num_descriptors, num_segments, num_strays;
} Belongings;
Belongings count_belongings(void);
/* All of it goes: threads, memory, descriptors, segments. How many threads did not end within the time; then all stays. */
int drop_region(int64_t patience_ms);

static inline bool is_in_region(uint64_t address) {
    return address - REGION_START < REGION_BYTES;
}

#endif
