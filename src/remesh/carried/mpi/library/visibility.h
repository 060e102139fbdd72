/* Which names does a library show? What programs and other libraries call; all else stays inside. */
#ifndef REMESH_VISIBILITY_H
#define REMESH_VISIBILITY_H

#define INTERNAL __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))

#endif
