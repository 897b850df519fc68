// Calls of the JDK's own HTTP client with its defaults, which ask for HTTP/2 by `Upgrade: h2c`.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Collectors;

public class Client {
  static final String BASE = System.getenv("POORWILL_BASE");
  static final HttpClient CLIENT = HttpClient.newHttpClient();

  static HttpRequest.Builder to(String path) {
    return HttpRequest.newBuilder(URI.create(BASE + path))
        .header("Authorization", "Bearer " + System.getenv("POORWILL_KEY"));
  }

  static void say(String name, HttpResponse<String> answer, String part) {
    boolean isRight = answer.statusCode() == 200 && answer.body().contains(part);
    String said = answer.statusCode() + " " + answer.body().replace('\n', ' ');
    System.out.println(isRight ? "ok " + name : "failed " + name + ": " + said);
  }

  public static void main(String[] args) throws Exception {
    var models = CLIENT.send(to("/v1/models").build(), HttpResponse.BodyHandlers.ofString());
    say("models", models, "\"birch\"");
    for (String stream : new String[] {"false", "true"}) {
      String body = "{\"model\":\"birch\",\"max_tokens\":8,\"stream\":" + stream
          + ",\"messages\":[{\"role\":\"user\",\"content\":\"Tell me of trees.\"}]}";
      var request = to("/v1/chat/completions").header("Content-Type", "application/json")
          .POST(HttpRequest.BodyPublishers.ofString(body)).build();
      if (stream.equals("false")) {
        say("chat", CLIENT.send(request, HttpResponse.BodyHandlers.ofString()), "\"content\"");
      } else {
        var answer = CLIENT.send(request, HttpResponse.BodyHandlers.ofLines());
        String all = answer.body().collect(Collectors.joining(" "));
        boolean isRight = answer.statusCode() == 200 && all.contains("[DONE]");
        System.out.println(isRight ? "ok stream" : "failed stream: " + answer.statusCode() + " " + all);
      }
    }
  }
}
