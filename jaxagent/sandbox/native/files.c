/* Files, read and written by a process of the sandbox's own user inside its own root: a path can lead nowhere that its
   programs could not go, and never to the host. */
#include "sandbox.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static int usable(int fd, struct stat *info) {
  struct statfs system;
  if (fstat(fd, info) || fstatfs(fd, &system)) return 0;
  if (S_ISDIR(info->st_mode)) return errno = EISDIR, 0;
  return S_ISREG(info->st_mode) && system.f_type != PROC_SUPER_MAGIC ? 1 : (errno = EINVAL, 0);
}

/* Data: u64 most bytes, path. Answers with the contents. */
void file_get(struct frame *request) {
  uint64_t most, size = 0;
  memcpy(&most, request->data, 8);
  struct stat info;
  int fd = open(request->data + 8, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  char *data = NULL;
  if (most > MAX_FRAME - 64) most = MAX_FRAME - 64;
  if (fd < 0 || !usable(fd, &info)) goto failed;
  if ((uint64_t)info.st_size > most && (errno = EFBIG)) goto failed;
  if (!(data = malloc((size_t)info.st_size + 1))) goto failed;
  while (size < (uint64_t)info.st_size) {
    ssize_t n = read(fd, data + size, (size_t)info.st_size - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) goto failed;
    if (n == 0) break;
    size += (uint64_t)n;
  }
  write_frame('D', request->id, data, size, "", 0);
  free(data), close(fd);
  return;
failed:
  write_error(request->id, errno, "read");
  free(data);
  if (fd >= 0) close(fd);
}

/* Data: u32 mode, u32 length of the path, path, zero, contents. Parents are made; a link at the path is replaced. */
void file_put(struct frame *request) {
  uint32_t mode, n_path;
  memcpy(&mode, request->data, 4), memcpy(&n_path, request->data + 4, 4);
  char *path = request->data + 8, *contents = path + n_path + 1, temporary[4200];
  size_t size = request->size - 9 - n_path;
  for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    int made = mkdir(path, 0755);
    *slash = '/';
    if (made && errno != EEXIST) goto failed;
  }
  if (n_path > 4096 || n_path == 0) {
    errno = ENAMETOOLONG;
    goto failed;
  }
  uint64_t number; /* one that no program of the sandbox knows: nothing can stand in the way */
  if (getrandom(&number, sizeof number, 0) != sizeof number) goto failed;
  snprintf(temporary, sizeof temporary, "%s.%016llx.part", path, (unsigned long long)number);
  int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) goto failed;
  while (size > 0) {
    ssize_t n = write(fd, contents, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    contents += n, size -= (size_t)n;
  }
  int bad = size > 0 || fchmod(fd, mode & 07777), error = errno;
  close(fd);
  if (!bad && !rename(temporary, path)) {
    write_frame('D', request->id, "", 0, "", 0);
    return;
  }
  if (bad) errno = error;
  error = errno;
  unlink(temporary);
  errno = error;
failed:
  write_error(request->id, errno, "write");
}

struct listing {
  char *bytes;
  size_t size, room;
  uint32_t entries, most;
};

static int add(struct listing *list, char kind, struct stat *info, const char *name) {
  size_t n = strlen(name), need = 15 + n;
  if (++list->entries > list->most) return errno = EFBIG, -1;
  if (list->size + need > list->room) {
    char *grown = realloc(list->bytes, list->room = 2 * (list->room + need));
    if (!grown) return -1;
    list->bytes = grown;
  }
  char *at = list->bytes + list->size;
  uint32_t mode = info->st_mode & 07777;
  uint64_t size = (uint64_t)info->st_size;
  uint16_t length = (uint16_t)n;
  at[0] = kind, memcpy(at + 1, &mode, 4), memcpy(at + 5, &size, 8), memcpy(at + 13, &length, 2);
  memcpy(at + 15, name, n);
  list->size += need;
  return 0;
}

static int walk(struct listing *list, int parent, const char *name, const char *prefix, int depth) {
  int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (depth ? O_NOFOLLOW : 0)), result = 0;
  if (fd < 0) return depth ? 0 : -1; /* a directory we may not enter is listed, but not what it holds */
  DIR *directory = fdopendir(fd);
  if (!directory) return close(fd), -1;
  for (struct dirent *entry; !result && (entry = readdir(directory));) {
    char path[8192];
    struct stat info;
    if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
    if ((size_t)snprintf(path, sizeof path, "%s%s", prefix, entry->d_name) >= 4096) continue;
    if (fstatat(fd, entry->d_name, &info, AT_SYMLINK_NOFOLLOW)) continue;
    char kind = S_ISREG(info.st_mode) ? 'f' : S_ISDIR(info.st_mode) ? 'd' : S_ISLNK(info.st_mode) ? 'l' : 'o';
    if ((result = add(list, kind, &info, path)) || kind != 'd') continue;
    if (depth == 64) continue;
    strcat(path, "/");
    result = walk(list, fd, entry->d_name, path, depth + 1);
  }
  closedir(directory);
  return result;
}

/* Data: u32 most entries, path. Answers with entries: kind, u32 mode, u64 size, u16 length, path below the given one. */
void file_list(struct frame *request) {
  struct listing list = {NULL, 0, 0, 0, 0};
  memcpy(&list.most, request->data, 4);
  if (walk(&list, AT_FDCWD, request->data + 4, "", 0))
    write_error(request->id, errno, "list");
  else
    write_frame('D', request->id, list.bytes, list.size, "", 0);
  free(list.bytes);
}
