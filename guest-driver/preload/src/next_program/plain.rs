// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs that cannot make or get a socket, nor start another program, by the table of symbols in
//! their file: `cat`, `true`, `sha256sum`. They run without the library, which would be more than
//! half of what their start costs.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Functions and variables of libc that a plain program may use. With none of them a process gets a
/// socket that it has not inherited, opens an object, starts a program or sees its environment as a
/// whole. Names that are not here count as if they did.
const HARMLESS: &str = "\
    _IO_stdin_used _ITM_deregisterTMCloneTable _ITM_registerTMCloneTable __asprintf_chk \
    __assert_fail __ctype_b_loc __ctype_get_mb_cur_max __ctype_tolower_loc \
    __ctype_toupper_loc __cxa_atexit __cxa_finalize __errno_location __explicit_bzero_chk \
    __fpending __fprintf_chk __fpurge __freading __getdelim __gmon_start__ __isoc23_sscanf \
    __isoc23_strtoimax __isoc23_strtol __isoc23_strtoll __isoc23_strtoul __isoc23_strtoull \
    __isoc23_strtoumax __isoc99_sscanf __libc_start_main __memcpy_chk __memmove_chk \
    __mempcpy_chk __memset_chk __open_2 __openat_2 __overflow __printf_chk __progname \
    __progname_full __realpath_chk __sched_cpucount __snprintf_chk __sprintf_chk \
    __stack_chk_fail __stpcpy_chk __strcat_chk __strcpy_chk __strncat_chk __strncpy_chk \
    __uflow __vasprintf_chk __vfprintf_chk __vprintf_chk __vsnprintf_chk __vsprintf_chk \
    _exit abort access aligned_alloc asprintf atexit bindtextdomain bsearch btowc calloc \
    chdir chmod clearerr clearerr_unlocked clock_gettime clock_nanosleep close closedir \
    copy_file_range dcgettext dcngettext dirfd dup dup2 err error error_at_line errx exit \
    explicit_bzero faccessat fchdir fchmod fclose fcntl fdatasync fdopen fdopendir feof \
    ferror fflush fflush_unlocked fgetc fgets fileno fopen fopen64 fprintf fputc \
    fputc_unlocked fputs fputs_unlocked fread fread_unlocked free freopen freopen64 fseek \
    fseeko fseeko64 fstat fstat64 fstatat fstatat64 fstatfs fsync ftell ftello ftello64 \
    ftruncate ftruncate64 futimens fwrite fwrite_unlocked getc getcwd getdelim getegid \
    getenv geteuid getgid gethostname getline getopt getopt_long getpagesize getpid getppid \
    getrandom getrusage gettimeofday getuid gmtime gmtime_r ioctl isatty iswalnum iswcntrl \
    iswctype iswprint iswspace link localeconv localtime localtime_r lseek lseek64 lstat \
    lstat64 madvise malloc mbrlen mbrtoc32 mbrtowc mbsinit mbstowcs memchr memcmp memcpy \
    memmem memmove mempcpy memrchr memset mkdir mkstemp mkstemp64 mktime mmap mmap64 munmap \
    nanosleep nl_langinfo open open64 openat openat64 opendir optarg opterr optind optopt \
    pathconf perror posix_fadvise posix_fadvise64 pread pread64 printf \
    program_invocation_name program_invocation_short_name putc putchar putchar_unlocked puts \
    qsort raise rawmemchr read readdir readdir64 readlink readlinkat realloc reallocarray \
    realpath rename renameat rewind rmdir sched_getaffinity setlocale setvbuf sigaction \
    sigaddset sigemptyset sigismember signal sigprocmask sleep snprintf sprintf stat stat64 \
    statfs statvfs stderr stdin stdout stpcpy strcasecmp strcat strchr strchrnul strcmp \
    strcoll strcpy strcspn strdup strerror strerror_r strftime strlen strncasecmp strncat \
    strncmp strncpy strndup strnlen strpbrk strrchr strsep strspn strstr strtod strtof \
    strtoimax strtok strtok_r strtol strtold strtoll strtoul strtoull strtoumax strverscmp \
    symlink sync sysconf tcgetattr tcsetattr textdomain time timegm towlower towupper \
    truncate truncate64 ttyname tzset uname ungetc unlink unlinkat usleep utimensat \
    vasprintf vfprintf vsnprintf warn warnx wcrtomb wcslen wctype wcwidth write";

/// Objects that a plain program may depend on.
const OBJECTS: [&[u8]; 2] = [b"libc.so.6", b"libm.so.6"];
/// How the name of the dynamic linker begins, on which it may depend, too.
const LINKER: &[u8] = b"ld-linux";

/// Sections and bytes of a table at most: a plain program is small.
const MOST_SECTIONS: u64 = 64;
const MOST_BYTES: u64 = 16 << 10;

const SECTION: usize = 64;
const SYMBOL: usize = 24;
const DYNAMIC_ENTRY: usize = 16;

const SHT_DYNAMIC: u64 = 6;
const SHT_DYNSYM: u64 = 11;
const DT_NULL: u64 = 0;
const DT_NEEDED: u64 = 1;
/// Entries that name objects, too: DT_CONFIG up to DT_AUDIT, DT_AUXILIARY and DT_FILTER.
const OTHER_OBJECTS: [std::ops::RangeInclusive<u64>; 2] =
    [0x6fff_fefa..=0x6fff_fefc, 0x7fff_fffd..=0x7fff_ffff];

/// Whether a file is a plain program. `false` also if it does not tell, and for scripts.
pub(super) fn is_plain(program: &Path) -> bool {
    Image::open(program).and_then(|file| is_plain_file(&file)).unwrap_or(false)
}

/// A file, and how it begins: the tables of a small program are there, but for its sections.
struct Image {
    file: File,
    start: Vec<u8>,
}

impl Image {
    fn open(path: &Path) -> Option<Image> {
        let file = File::open(path).ok()?;
        let mut start = vec![0; 4096];
        let n = file.read_at(&mut start, 0).ok()?;
        start.truncate(n);
        Some(Image { file, start })
    }

    /// A part of the file.
    fn part(&self, at: u64, size: u64) -> Option<Vec<u8>> {
        let (from, n) = (usize::try_from(at).ok()?, usize::try_from(size).ok()?);
        if let Some(known) = self.start.get(from..from.checked_add(n)?) {
            return Some(known.to_vec());
        }
        let mut bytes = vec![0; Some(n).filter(|_| size <= MOST_BYTES)?];
        self.file.read_exact_at(&mut bytes, at).ok().map(|()| bytes)
    }
}

/// `None`: it is no ELF file for 64 bits, or its tables are larger than those of small programs.
fn is_plain_file(file: &Image) -> Option<bool> {
    let header = file.part(0, 64)?;
    // 64 bits, little-endian.
    if !header.starts_with(b"\x7fELF\x02\x01") || number::<2>(&header, 58)? != SECTION as u64 {
        return None;
    }
    let n = number::<2>(&header, 60).filter(|n| *n <= MOST_SECTIONS)?;
    let sections = file.part(number::<8>(&header, 40)?, n * SECTION as u64)?;
    let (symbols, names) = section_and_names(file, &sections, SHT_DYNSYM)?;
    let (dynamic, objects) = section_and_names(file, &sections, SHT_DYNAMIC)?;
    Some(has_plain_objects(&dynamic, &objects)? && has_plain_symbols(&symbols, &names)?)
}

/// The one section of a kind, and the section with its names.
fn section_and_names(file: &Image, sections: &[u8], kind: u64) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut found = sections.chunks_exact(SECTION).filter(|one| number::<4>(one, 4) == Some(kind));
    let section = found.next()?;
    if found.next().is_some() {
        return None;
    }
    let at = usize::try_from(number::<4>(section, 40)?).ok()?;
    let names = sections.chunks_exact(SECTION).nth(at)?;
    let content = |section| file.part(number::<8>(section, 24)?, number::<8>(section, 32)?);
    Some((content(section)?, content(names)?))
}

fn has_plain_objects(dynamic: &[u8], names: &[u8]) -> Option<bool> {
    let mut has_libc = false;
    for entry in dynamic.chunks_exact(DYNAMIC_ENTRY) {
        match number::<8>(entry, 0)? {
            DT_NULL => return Some(has_libc),
            DT_NEEDED => {
                let object = name(names, number::<8>(entry, 8)?)?;
                if !OBJECTS.contains(&object) && !object.starts_with(LINKER) {
                    return Some(false);
                }
                has_libc |= object == OBJECTS[0];
            }
            tag if OTHER_OBJECTS.iter().any(|tags| tags.contains(&tag)) => return Some(false),
            _ => {}
        }
    }
    None
}

/// Whether all names of the table are harmless, also those of variables that the program has a copy
/// of. The first entry has none.
fn has_plain_symbols(symbols: &[u8], names: &[u8]) -> Option<bool> {
    let entries = symbols.chunks_exact(SYMBOL).skip(1);
    let used = entries.map(|symbol| name(names, number::<4>(symbol, 0)?));
    let mut used = used.collect::<Option<Vec<_>>>()?;
    used.sort_unstable();
    // Both lists are in order, so one pass is enough.
    let mut harmless = HARMLESS.split(' ').map(str::as_bytes);
    let mut now = harmless.next();
    Some(used.iter().all(|name| {
        while now.is_some_and(|now| now < *name) {
            now = harmless.next();
        }
        now == Some(*name)
    }))
}

/// The name at a place of a table of names.
fn name(names: &[u8], at: u64) -> Option<&[u8]> {
    let rest = names.get(usize::try_from(at).ok()?..)?;
    rest.get(..rest.iter().position(|byte| *byte == 0)?)
}

/// A little-endian number of `N` bytes.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let part = bytes.get(at..at + N)?;
    Some(part.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_harmless_names_are_in_order() {
        let names: Vec<_> = HARMLESS.split(' ').collect();
        let out_of_order = names.windows(2).find(|two| two[0] >= two[1]);
        assert_eq!(out_of_order, None);
        assert!(names.iter().all(|name| !name.is_empty() && name.is_ascii()));
    }

    #[test]
    fn programs_of_the_system_are_what_they_are() {
        for (program, plain) in [
            ("/bin/true", true),
            ("/bin/cat", true),
            ("/bin/sh", false),
            // It shows its environment.
            ("/usr/bin/printenv", false),
            ("/usr/bin/env", false),
            ("/proc/self/exe", false),
            ("/etc/passwd", false),
            ("/dev/null", false),
            ("/nonexistent", false),
        ] {
            assert_eq!(is_plain(Path::new(program)), plain, "{program}");
        }
    }

    /// Each place of the file that is read may say anything.
    #[test]
    fn a_file_with_a_lie_harms_nobody() {
        let whole = std::fs::read("/bin/true").unwrap();
        let start = number::<8>(&whole, 40).unwrap() as usize;
        let path = std::env::temp_dir().join(format!("smc-plain-{}", std::process::id()));
        let ask = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            is_plain(&path)
        };
        assert!(ask(&whole));
        for size in [0, 3, 63, 64, 200, start, whole.len() - 1] {
            assert!(!ask(&whole[..size]), "{size} bytes");
        }
        assert!(ask(&whole));
        let file = File::options().write(true).open(&path).unwrap();
        for at in (40..48).chain(58..62).chain(start..whole.len()) {
            for value in [0x00, 0x7f, 0xff] {
                file.write_all_at(&[value], at as u64).unwrap();
                let _ = is_plain(&path);
            }
            file.write_all_at(&whole[at..=at], at as u64).unwrap();
        }
        assert!(is_plain(&path));
        std::fs::remove_file(path).unwrap();
    }

    /// One name that is not in the list is enough, whether libc or the program has the symbol.
    #[test]
    fn one_other_name_is_enough() {
        let symbol = |name: u8, section: u8| {
            let mut symbol = [0; SYMBOL];
            (symbol[0], symbol[6]) = (name, section);
            symbol
        };
        let names = b"\0write\0socket\0exit\0";
        let ask = |all: &[[u8; SYMBOL]]| has_plain_symbols(&all.concat(), names);
        let none = symbol(0, 0);
        assert_eq!(ask(&[none, symbol(1, 0), symbol(14, 0), symbol(1, 0)]), Some(true));
        for section in [0, 7] {
            assert_eq!(ask(&[none, symbol(1, 0), symbol(7, section)]), Some(false));
        }
        assert_eq!(ask(&[none, symbol(200, 0)]), None);
    }
}
