// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* A library that wraps functions of libc, and looks for the next ones when they are first called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static volatile unsigned long calls;

#define NEXT(name) \
    static __typeof__(name) *volatile next; \
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED); \
    if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t read(int fd, void *buf, size_t n) { NEXT(read); return next(fd, buf, n); }
ssize_t write(int fd, const void *buf, size_t n) { NEXT(write); return next(fd, buf, n); }
ssize_t recv(int fd, void *buf, size_t n, int flags) { NEXT(recv); return next(fd, buf, n, flags); }

ssize_t recvfrom(int fd, void *buf, size_t n, int flags, struct sockaddr *from, socklen_t *len)
{
    /* By the handle of libc. */
    static ssize_t (*volatile next)(int, void *, size_t, int, struct sockaddr *, socklen_t *);
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    if (!next) *(void **)&next = dlsym(dlopen("libc.so.6", RTLD_LAZY), "recvfrom");
    return next(fd, buf, n, flags, from, len);
}

int fcntl(int fd, int command, ...)
{
    /* A wrapper of one name may call another name of the same function. */
    static int (*volatile next)(int, int, long);
    va_list arguments;
    va_start(arguments, command);
    long argument = va_arg(arguments, long);
    va_end(arguments);
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "fcntl64");
    return next(fd, command, argument);
}

unsigned long wrapped_calls(void) { return calls; }
