// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A process whose threads open the device, make connections, and read and set the environment, while
// the first thread makes children in each way that there is. `forks_beside PORT CHILDREN`. A child
// that has not ended after 20 s is ended by SIGALRM. `forks_beside child PORT` is one that is executed.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(is) \
    do { if (!(is)) { dprintf(2, "%d: line %d: %s, errno %d\n", getpid(), __LINE__, #is, errno); _exit(3); } } while (0)
#define THREADS 3

static const char *names[THREADS] = { "BESIDE0", "BESIDE1", "BESIDE2" };

extern char **environ;
static int port;
static atomic_int done;

static void echo(const char *text) {
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    char back[64];
    ssize_t length = strlen(text);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (void *)&to, sizeof to) == 0);
    CHECK(send(fd, text, length, MSG_NOSIGNAL) == length);
    CHECK(recv(fd, back, length, MSG_WAITALL) == length && memcmp(text, back, length) == 0);
    CHECK(close(fd) == 0);
}

static void *work(void *at) {
    const char *name = names[(long)at];
    while (!done) {
        echo("from a thread");
        setenv(name, "1", 1);
        (void)getenv("PATH");
    }
    return NULL;
}

static int child_of_fork(pid_t (*make)(void), int executes) {
    pid_t child = make();
    if (child == 0) {
        alarm(20);
        if (executes) execlp("true", "true", NULL);
        (void)getenv("PATH");
        echo("from a child");
        exit(0);
    }
    int status = -1;
    CHECK(child > 0);
    while (waitpid(child, &status, 0) < 0) CHECK(errno == EINTR);
    return status;
}

static int child_of_vfork(void) {
    int status = -1;
    char *words[] = { "true", NULL };
    pid_t child = vfork();
    if (child == 0) {
        execvp("true", words);
        _exit(127);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return status;
}

static int spawned(const char *file, const char *first, const char *second) {
    int status = -1;
    pid_t child;
    char *words[] = { (char *)file, (char *)first, (char *)second, NULL };
    CHECK(posix_spawnp(&child, file, NULL, NULL, words, environ) == 0);
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

// A daemon is nobody's child: it says by a pipe that it has ended.
static int daemon_of_child(void) {
    int ends[2], status = -1;
    char byte;
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        CHECK(daemon(1, 1) == 0);
        alarm(20);
        echo("from a daemon");
        CHECK(write(ends[1], "e", 1) == 1);
        exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    close(ends[1]);
    CHECK(read(ends[0], &byte, 1) == 1);
    close(ends[0]);
    return status;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "child") == 0) {
        alarm(20);
        port = atoi(argv[2]);
        echo("from a program");
        return 0;
    }
    CHECK(argc == 3);
    port = atoi(argv[1]);
    pthread_t threads[THREADS];
    // libc has no lock for a reader while a thread adds a name.
    for (int i = 0; i < THREADS; i++) setenv(names[i], "0", 1);
    for (long i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    for (int n = 0; n < atoi(argv[2]); n++) {
        int status = 0;
        switch (n % 9) {
        case 0: status = child_of_fork(fork, 0); break;
        case 1: status = child_of_fork(fork, 1); break;
        case 2: status = child_of_fork(_Fork, 1); break;
        case 3: status = child_of_vfork(); break;
        case 4: status = spawned("true", NULL, NULL); break;
        case 5: status = system("true"); break;
        case 6: status = pclose(popen("true", "r")); break;
        case 7: status = daemon_of_child(); break;
        case 8: status = spawned(argv[0], "child", argv[1]); break;
        }
        if (status != 0) {
            printf("child %d of way %d: status %#x\n", n, n % 9, status);
            return 1;
        }
    }
    done = 1;
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    puts("all children");
    return 0;
}
